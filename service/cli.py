"""The ``moelet`` command; it imports torch only in the commands that need it."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from .. import __version__
from . import options
from .options import path_of

app = typer.Typer(
    name="moelet",
    help="Serve mixture-of-experts layers with hot-swappable LoRA adapters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MOST = 4096
"""Adapter slots, or ranks, that ``inspect`` counts with."""

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])
"""click's ``UsageError``, wherever typer keeps it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code. What is wrong with it is one sentence on stderr and code 2."""
    if sys.stderr is None:  # whoever started us closed it
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be UTF-8
    serves = (sys.argv[1:] if arguments is None else arguments)[:1] == ["serve"]
    try:
        with ending_on_signals() if serves else nullcontext():
            code = app(arguments, standalone_mode=False)
    except UsageError as error:
        sentence = error.format_message()
        return complain(sentence) if sentence else 2  # empty where the help was shown instead
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def count_of(text: str | int) -> int:
    """A whole number of the command line, at least 1."""
    if not (re.fullmatch(r"\d{1,9}", str(text), re.ASCII) and 1 <= int(text) <= MOST):
        raise typer.BadParameter(f"it should be a whole number in 1..{MOST}, got {text!r}")
    return int(text)


def complain(sentence: str) -> int:
    """Say what is wrong on stderr; the exit code 2."""
    print(f"moelet: {' '.join(sentence.split())}", file=sys.stderr)
    return 2


def print_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(f"moelet {__version__}")
        raise typer.Exit


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """End with code 0 on SIGTERM and SIGINT while options are read and modules imported, which takes seconds: there is
    nothing to put away yet, and the first process of a container would not hear of them otherwise. Who serves listens
    to them itself."""
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.callback()
def moelet(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve mixture-of-experts layers with hot-swappable LoRA adapters."""


@app.command()
def serve(
    checkpoint: options.Checkpoint = None,
    demo: options.Demo = None,
    host: options.Host = None,
    port: options.Port = None,
    uds: options.Uds = None,
    device: options.Device = None,
    layers: options.Layers = None,
    served_model_name: options.ServedModelName = None,
    adapter: options.Adapter = None,
    adapter_root: options.AdapterRoot = None,
    max_loras: options.MaxLoras = None,
    max_cpu_loras: options.MaxCpuLoras = None,
    max_lora_rank: options.MaxLoraRank = None,
    max_decode_tokens: options.MaxDecodeTokens = None,
    decode_shapes: options.DecodeShapes = None,
    plan: options.Plan = None,
    max_batch_tokens: options.MaxBatchTokens = None,
    max_queue: options.MaxQueue = None,
    max_queue_mb: options.MaxQueueMb = None,
    max_queue_delay_us: options.MaxQueueDelayUs = None,
    request_timeout_s: options.RequestTimeoutS = None,
    api_key: options.ApiKey = None,
    admin_api_key: options.AdminApiKey = None,
    max_body_mb: options.MaxBodyMb = None,
    body_timeout_s: options.BodyTimeoutS = None,
    log_format: options.LogFormat = None,
    log_level: options.LogLevel = None,
) -> int:
    """Serve the MoE layers of a checkpoint over HTTP.

    Every option is also MOELET_<NAME> in the environment (lists there are separated by commas); the option wins.
    """
    return serve_as(dict(locals()))


def serve_as(given: dict[str, Any]) -> int:
    """``serve`` with the options ``given``; the exit code."""
    from ..layer.errors import MoeletError
    from .argument_list import hide
    from .logs import configure_logs
    from .settings import Settings

    admin_api_key = given["admin_api_key"]
    hide([*(given["api_key"] or []), *([admin_api_key] if admin_api_key else [])])
    try:
        settings = Settings.read(**given)
        configure_logs(settings.log_format, settings.log_level)
        from .server import serve as run

        return run(settings)
    except MoeletError as error:
        return complain(str(error))


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(parser=path_of, metavar="DIR", help="Folder to write into.")],
) -> int:
    """Write the demo checkpoint and its adapters."""
    from ..layer.demo import write_demo
    from ..layer.errors import MoeletError

    try:
        paths = write_demo(directory)
    except MoeletError as error:
        return complain(str(error))
    print(f"checkpoint {paths.checkpoint}")
    for name, path in paths.adapters.items():
        print(f"adapter {name} {path}")
    return 0


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(parser=path_of, metavar="PATH", help="Folder of a checkpoint or an adapter.")],
    base: Annotated[
        Path | None, typer.Option(parser=path_of, metavar="PATH", help="Checkpoint that an adapter is for.")
    ] = None,
    max_loras: Annotated[
        int, typer.Option(parser=count_of, metavar="INTEGER", help="Adapter slots to count with.")
    ] = 8,
    max_lora_rank: Annotated[
        int, typer.Option(parser=count_of, metavar="INTEGER", help="Largest rank of an adapter.")
    ] = 64,
    json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> int:
    """Tell what a checkpoint or adapter is, layer by layer, without serving it."""
    from ..layer.errors import MoeletError
    from . import inspection

    try:
        report = inspection.inspect(path, base, max_loras=max_loras, max_lora_rank=max_lora_rank)
    except MoeletError as error:
        return complain(str(error))
    print(inspection.as_json(report)) if json else inspection.show(report)
    return 0


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(arguments: typer.Context) -> int:
    """Time layers and kernels on the GPU; without arguments, list what can be timed."""
    from importlib import import_module

    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        return complain("benchmarks come with a source checkout, and this installation is none: clone the repository")
    sys.path.append(str(checkout))
    code: int = import_module("benchmarks.__main__").main(arguments.args)
    return code
