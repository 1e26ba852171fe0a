"""The options of ``moelet serve``, in the words of its help; what they mean and default to is in ``settings.py``."""

from pathlib import Path
from typing import Annotated

import typer


def path_of(text: str) -> Path:
    """A path of the command line; an empty one, as of a shell variable that is not set, is not the folder we are in."""
    if not text:
        raise typer.BadParameter("it should be a path, and is empty")
    return Path(text)


Checkpoint = Annotated[
    Path | None, typer.Argument(parser=path_of, metavar="CHECKPOINT", help="Folder of a Hugging Face checkpoint.")
]
Demo = Annotated[bool | None, typer.Option("--demo", metavar="", help="Serve a small checkpoint and two adapters.")]
Host = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (127.0.0.1).")]
Port = Annotated[str | None, typer.Option(metavar="INTEGER", help="Port to listen on, 0 for any free one (8000).")]
Uds = Annotated[
    Path | None,
    typer.Option(parser=path_of, metavar="PATH", help="Unix socket to listen on, instead of host and port."),
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N (auto).")]
Layers = Annotated[str | None, typer.Option(metavar="NUMBERS", help="MoE layers to serve, such as 0-3,7 (all).")]
ServedModelName = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model (the folder's).")]
Adapter = Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="Adapter to load; repeatable.")]
AdapterRoot = Annotated[
    list[Path] | None,
    typer.Option(parser=path_of, metavar="DIR", help="Folder below which clients may load adapters; repeatable."),
]
MaxLoras = Annotated[str | None, typer.Option(metavar="INTEGER", help="Adapter slots in the engine (8).")]
MaxCpuLoras = Annotated[str | None, typer.Option(metavar="INTEGER", help="Adapters loaded at most (32).")]
MaxLoraRank = Annotated[str | None, typer.Option(metavar="INTEGER", help="Largest rank of an adapter (64).")]
MaxDecodeTokens = Annotated[str | None, typer.Option(metavar="INTEGER", help="GPU: largest captured batch (256).")]
DecodeShapes = Annotated[
    str | None, typer.Option(metavar="NUMBERS", help="GPU: batch sizes to capture, such as 1,2,4.")
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="GPU: auto, fused, single_stream, two_stream or two_stream_overlap_down (auto).",
    ),
]
MaxBatchTokens = Annotated[
    str | None, typer.Option(metavar="INTEGER", help="Tokens computed together (GPU: the decode limit; CPU: 256).")
]
MaxQueue = Annotated[str | None, typer.Option(metavar="INTEGER", help="Requests that may wait (1024).")]
MaxQueueMb = Annotated[str | None, typer.Option(metavar="NUMBER", help="Their tensors at most, in 2^20 bytes (512).")]
MaxQueueDelayUs = Annotated[
    str | None, typer.Option(metavar="INTEGER", help="Wait so long to fill a batch while the engine is busy (0).")
]
RequestTimeoutS = Annotated[
    str | None, typer.Option(metavar="NUMBER", help="How long a forward may take, in seconds (60).")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", help="Key that requests need; repeatable. Best kept in MOELET_API_KEY."),
]
AdminApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Key that loading and unloading need. Best kept in MOELET_ADMIN_API_KEY."),
]
MaxBodyMb = Annotated[str | None, typer.Option(metavar="NUMBER", help="Largest request body, in 2^20 bytes (64).")]
BodyTimeoutS = Annotated[
    str | None, typer.Option(metavar="NUMBER", help="Time for a request to arrive whole, in seconds (20).")
]
LogFormat = Annotated[str | None, typer.Option(metavar="FORMAT", help="text or json (text).")]
LogLevel = Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error (info).")]
