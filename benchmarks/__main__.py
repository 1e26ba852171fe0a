"""``python -m benchmarks NAME …``, which is ``moelet bench NAME …``: runs the benchmark that is named."""

import importlib
import sys
from collections.abc import Sequence

from moelet.layer.errors import ConfigurationError

from .options import run

COMMANDS = {
    "layer": "one layer forward, against its floor and its peers",
    "kernels": "the kernels of one forward, one by one",
    "counters": "what the hardware counters say of each kernel, by Nsight Compute",
    "host": "hidden states in host memory to output in host memory, through the engine",
    "overhead": "what the service adds to a forward, over loopback against a bare echo; no GPU needed",
    "soak": "everything at once against a serving process for a time, every answer checked; no GPU needed",
    "tables": "rewrite the tables of README.md and benchmarks/README.md from the newest results",
    "plot": "draw time against the floor and the peers over the token count",
}


def command(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names; without one, or with ``--help``, say which there are."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: moelet bench NAME [OPTIONS]; --help behind a name lists its options\n")
        for name, what in COMMANDS.items():
            print(f"  {name:10}{what}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigurationError(f"there is no benchmark {name!r}; there are {', '.join(COMMANDS)}")
    code: int = importlib.import_module(f".{name}", __package__).main(rest)
    return code


def main(arguments: Sequence[str]) -> int:
    """The exit code of the benchmark that ``arguments`` begin with."""
    return run(command, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
