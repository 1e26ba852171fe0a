"""``python -m moelet.graphs.ahead FOLDER [ARCH]``: compiles every kernel into a folder, for an image to ship."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..layer.errors import MoeletError
from .compiler import DEFAULT_ARCH, compile_all
from .kernels import all_specialisations

USAGE = "usage: python -m moelet.graphs.ahead FOLDER [ARCH], such as sm_90a"


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one sentence on stderr. ``MOELET_CUBIN_DIR`` is to name the folder afterwards."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if len(arguments) not in (1, 2) or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    folder, arch = Path(arguments[0]), arguments[1] if len(arguments) == 2 else DEFAULT_ARCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = compile_all(all_specialisations(), arch, folder)
    except (MoeletError, OSError) as error:
        print(f"the kernels were not compiled: {error}", file=sys.stderr)
        return 2
    print(f"{len(written)} cubins for {arch} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
