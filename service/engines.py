"""Which engine serves: on the GPU where there is a usable one, else the CPU, or what ``--device`` says."""

from importlib.util import find_spec

import torch

from ..layer.checkpoint import Checkpoint
from ..layer.engine import Engine
from ..layer.errors import DeviceUnavailableError
from ..layer.reference import ReferenceEngine
from .progress import Report, steps
from .settings import Settings

MIN_CAPABILITY = (9, 0)


def choose_device(asked: str) -> str:
    """``"cpu"`` or ``"cuda:N"`` for a ``--device``. Raises ``DeviceUnavailableError`` saying what to do."""
    if asked == "cpu":
        return "cpu"
    index = int(asked.partition(":")[2] or 0)
    trouble = gpu_trouble(index)
    if trouble is None:
        return f"cuda:{index}"
    if asked == "auto":
        return "cpu"
    raise DeviceUnavailableError(f"--device {asked} cannot be used: {trouble}; serve on the CPU with --device cpu")


def gpu_trouble(index: int) -> str | None:
    """Why GPU ``index`` cannot be used, or None."""
    if not has_cuda_python():
        return "cuda-python is not installed"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable NVIDIA GPU and driver"
    if index >= torch.cuda.device_count():
        return f"there are only {torch.cuda.device_count()} GPUs, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return "its compute capability is {}.{}, and {}.{} is needed".format(*capability, *MIN_CAPABILITY)
    return None


def has_cuda_python() -> bool:
    """Whether the GPU engine's way to the driver is installed."""
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


def open_engine(settings: Settings, device: str, checkpoint: Checkpoint, report: Report) -> Engine:
    """The engine on ``device`` with every layer of ``checkpoint`` loaded; call on the engine thread.

    On the CPU the weights stay as they are read; a GPU takes them layer by layer, so that the host
    holds one layer at a time.
    """
    model = checkpoint.model
    layers = steps(sorted(model.layers), "loading layers", report)
    if device == "cpu":
        weights = {index: checkpoint.load_layer(index) for index in layers}
        return ReferenceEngine(model, weights, max_loras=settings.max_loras, max_lora_rank=settings.max_lora_rank)
    from ..graphs.engine import GraphEngine
    from ..graphs.options import GraphOptions
    from ..graphs.program import Plan

    options = GraphOptions(
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        max_decode_tokens=settings.max_decode_tokens,
        decode_shapes=settings.decode_shapes or (),
        plan=None if settings.plan == "auto" else Plan(settings.plan),
    )
    engine = GraphEngine(model, options, ordinal=int(device.partition(":")[2]))
    for index in layers:
        engine.add_layer(index, checkpoint.load_layer(index))
    engine.start(report)
    return engine
