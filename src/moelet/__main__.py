"""``python -m moelet``: the same as the ``moelet`` command."""

import sys

from moelet.service.cli import main

sys.exit(main())
