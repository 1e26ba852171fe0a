"""Which engine serves: on the GPU where there is a usable one, else the CPU, or what ``--device`` says."""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from ..layer.engine import Engine
from ..layer.errors import DeviceUnavailableError
from ..layer.reference import ReferenceEngine
from ..layer.spec import ModelSpec
from ..layer.weights import LayerWeights
from .settings import Settings

MIN_CAPABILITY = (9, 0)
GRAPH_ENGINE = "..graphs.engine"


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
    if find_spec(GRAPH_ENGINE, __package__) is None:
        return "this installation has no GPU engine"
    if not torch.cuda.is_available():
        return "PyTorch finds no usable NVIDIA GPU and driver"
    if index >= torch.cuda.device_count():
        return f"there are only {torch.cuda.device_count()} GPUs, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return "its compute capability is {}.{}, and {}.{} is needed".format(*capability, *MIN_CAPABILITY)
    return None


def engine_opener(
    settings: Settings, device: str, model: ModelSpec, weights: Mapping[int, LayerWeights]
) -> Callable[[], Engine]:
    """What opens the engine, to be called on the engine thread."""
    slots = {"max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
    if device == "cpu":
        return partial(ReferenceEngine, model, weights, **slots)
    graph_engine: Callable[..., Engine] = import_module(GRAPH_ENGINE, __package__).GraphEngine
    return partial(
        graph_engine,
        model,
        weights,
        **slots,
        device=device,
        plan=settings.plan,
        max_decode_tokens=settings.max_decode_tokens,
        decode_shapes=settings.decode_shapes,
    )
