"""Command-line options that the benchmarks share, and the one sentence that each wrong one ends with."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from moelet.graphs.driver import USE_CPU
from moelet.graphs.program import Plan
from moelet.layer.errors import ConfigurationError, MoeletError
from moelet.layer.spec import LayerSpec

from . import shapes
from .floor import expert_bytes
from .workload import ALL, Routing

NUMBERED = ("num_experts", "top_k", "hidden_size", "intermediate_size")
MOST_TOKENS, MOST_RANK = 1 << 20, 4096
MOST = 1 << 16
"""Of anything else that is counted."""
MOST_WEIGHT_BYTES = 1 << 40
"""Of one layer by its numbers: several times what a GPU holds."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ``ConfigurationError``, as those of everything else are."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # results keep the command, less some options by their names

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message)


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """The exit code of ``command``; what is wrong is one sentence on stderr and code 2."""
    try:
        return command(arguments)
    except MoeletError as error:
        sentence = str(error).removesuffix(f"; {USE_CPU}")  # to serve is not what was asked for
        print(f"moelet bench: {' '.join(sentence.split())}", file=sys.stderr)
        return 2


def counts(text: str) -> list[int]:
    """``1,4,16``: token counts, each once."""
    return list(dict.fromkeys(_whole_numbers(text, 1, MOST_TOKENS)))


def ranks(text: str) -> list[int]:
    """``0,16``: LoRA ranks, ascending, 0 for the base layer."""
    return sorted(set(_whole_numbers(text, 0, MOST_RANK)))


def adapter_counts(text: str) -> list[int | str]:
    """``1,4,all``: numbers of adapters."""
    return [part if part == ALL else _whole_numbers(part, 1, MOST)[0] for part in text.split(",")]


def numbers(least: int, most: int = MOST) -> Callable[[str], list[int]]:
    """What reads whole numbers from ``least`` to ``most``, with commas between them."""
    return lambda text: _whole_numbers(text, least, most)


def number(least: int, most: int = MOST) -> Callable[[str], int]:
    """What reads a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        found = _whole_numbers(text, least, most)
        if len(found) > 1:
            raise argparse.ArgumentTypeError(f"expected one number, got {text!r}")
        return found[0]

    return read


replays = number(3)
"""A number of replays that has deciles."""


def seconds(text: str) -> float:
    """``0.5``: a time above 0, of a day at the most."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found <= 86400.0:
        raise argparse.ArgumentTypeError(f"expected seconds above 0 and up to 86400, got {text!r}")
    return found


def result_file(text: str) -> Path:
    """Where results can be written: nothing yet, or a file, in a folder that there is or can be."""
    path = Path(text)
    above = next((each for each in path.absolute().parents if each.exists()), path)
    if path.is_dir() or not above.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, got {text!r}")
    return path


def folder(text: str) -> Path:
    """Where files can be written: a folder, or nothing yet in a folder that there is or can be."""
    path = Path(text)
    above = next((each for each in (path.absolute(), *path.absolute().parents) if each.exists()), path)
    if not text or not above.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}")
    return path


def device(text: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:N``."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    return text


def _whole_numbers(text: str, least: int, most: int) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least or max(found) > most:
        raise argparse.ArgumentTypeError(f"expected whole numbers from {least} to {most}, got {text!r}")
    return found


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which layers."""
    group = parser.add_argument_group("layers")
    group.add_argument(
        "--shape", action="append", choices=shapes.SHAPES, help=f"repeatable; {shapes.DEFAULT_SHAPE} by default"
    )
    for name in NUMBERED:
        group.add_argument(
            f"--{name.replace('_', '-')}", type=number(1, 1 << 20), help="a layer by its numbers takes all four"
        )
    group.add_argument(
        "--shared",
        action="store_true",
        help=f"with the shared experts, where the checkpoint has them: results are then of SHAPE{shapes.SHARED}",
    )


def chosen_shapes(options: argparse.Namespace) -> dict[str, LayerSpec]:
    """The layers asked for, by the names that results have for them. Raises ``ConfigurationError``."""
    numbers = [getattr(options, name) for name in NUMBERED]
    by_numbers = any(number is not None for number in numbers)
    chosen = options.shape or ([] if by_numbers else [shapes.DEFAULT_SHAPE])
    called = shapes.with_shared if options.shared else str
    found = {called(name): shapes.named(name, shared=options.shared) for name in chosen}
    if by_numbers:
        if None in numbers:
            raise ConfigurationError("a layer by its numbers takes --" + ", --".join(NUMBERED).replace("_", "-"))
        name, spec = shapes.numbered(*numbers)
        if (num_bytes := spec.num_experts * expert_bytes(spec)) > MOST_WEIGHT_BYTES:
            raise ConfigurationError(f"{name} has {num_bytes} bytes of weights, at most {MOST_WEIGHT_BYTES} are run")
        found[name] = spec
    return found


def run_options(parser: argparse.ArgumentParser, *, tokens: Sequence[int], timed: bool = True) -> None:
    """Add the options of how to measure and where to write; what is not ``timed`` is run once, over one weight set."""
    group = parser.add_argument_group("method")
    shown = ",".join(map(str, tokens))
    group.add_argument("--tokens", type=counts, default=list(tokens), help=f"token counts ({shown})")
    if timed:
        group.add_argument("--sets", type=number(1), default=4, help="complete weight sets taken in turn (4)")
        group.add_argument("--replays", type=replays, default=51, help="timed replays (51)")
    else:
        parser.set_defaults(sets=1)
    group.add_argument("--gpu", type=number(0), default=0, metavar="N", help="which GPU (0)")
    group.add_argument("--json", type=result_file, metavar="PATH", help="one file for all results (by date and shape)")
    group.add_argument("--commit", help="what to record as the commit where this is no git checkout")


def workload_options(group: "argparse._ArgumentGroup") -> None:
    """Add the options of which adapters and which routing, for benchmarks that take one workload after the other."""
    group.add_argument("--ranks", type=ranks, default=[0, 16], help="LoRA ranks, 0 for the base (0,16)")
    group.add_argument(
        "--adapters", type=adapter_counts, default=[1, 4], help="adapters mixed over the tokens (1,4), or all"
    )
    group.add_argument("--slots", type=number(0), default=8, help="adapter slots, which 'all' goes through in turn (8)")
    group.add_argument("--max-lora-rank", type=number(1, MOST_RANK), help="rank of the slots (the largest of --ranks)")
    group.add_argument("--routing", choices=[each.value for each in Routing], default="uniform")


def one_plan_option(group: "argparse._ArgumentGroup") -> None:
    """Add the option of which plan, for benchmarks that take one."""
    group.add_argument("--plan", choices=[plan.value for plan in Plan], default=Plan.FUSED.value)


def check(options: argparse.Namespace) -> None:
    """Raise ``ConfigurationError`` for numbers that contradict each other."""
    rank = max(options.ranks)
    needed = max([1, *(count for count in options.adapters if isinstance(count, int))])
    if rank and options.slots < needed:
        raise ConfigurationError(f"--adapters {needed} does not fit into --slots {options.slots}")
    if options.max_lora_rank is not None and options.max_lora_rank < rank:
        raise ConfigurationError(f"--ranks {rank} does not fit into --max-lora-rank {options.max_lora_rank}")
