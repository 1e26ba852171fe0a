"""``python -m moelet.service.probe PATH``: a health check, whether the service here answers a path with 200."""

import http.client
import os
import sys
from collections.abc import Sequence

TIMEOUT_S = 3.0


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 if the service on ``MOELET_PORT`` answers 200, else 1 and what it said, on stderr."""
    if len(arguments) != 1 or not arguments[0].startswith("/"):
        print("usage: python -m moelet.service.probe PATH, such as /health", file=sys.stderr)
        return 2
    # as the service reads it: in any case, and empty is absent
    port = next((value for name, value in os.environ.items() if name.lower() == "moelet_port" and value), "8000")
    if not (port.isascii() and port.isdecimal()):
        print(f"MOELET_PORT should be the number of a port, got {port!r}", file=sys.stderr)
        return 2
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", arguments[0])
        answer = connection.getresponse()
        said = answer.read(500).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        print(f"{arguments[0]} is not answered: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if answer.status != 200:
        print(f"{arguments[0]} is answered with {answer.status}: {said}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
