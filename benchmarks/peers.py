"""Other implementations of the base layer, captured and timed in the same run and checked against the same truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec
from moelet.layer.weights import LayerWeights

from .forwards import WeightSet
from .rig import Rig
from .workload import relative_error, worst

Layer = Callable[[Tensor, Tensor, Tensor, LayerWeights], Tensor]
"""``(hidden [T, H], topk_ids [T, k] int32, topk_weights [T, k] fp32, weights) -> [T, H]``, none of it synchronising."""

NAMES = ("torch grouped_mm", "vllm")


def grouped_mm(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: LayerWeights, *, spec: LayerSpec
) -> Tensor:
    """``torch._grouped_mm`` twice: sort slot rows by expert, gather, multiply, activate, multiply, sum in fp32."""
    local = spec.num_local_experts
    expert = topk_ids.flatten() - spec.local_expert_offset
    expert = expert.where((expert >= 0) & (expert < local), local)  # those held elsewhere go last, in no group
    ordered, order = expert.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(local, device=hidden.device, dtype=expert.dtype), right=True)
    offsets = ends.to(torch.int32)
    token = order // spec.top_k
    gate, up = torch._grouped_mm(hidden[token], weights.gate_up.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
    down = torch._grouped_mm(silu(gate) * up, weights.down.transpose(-2, -1), offs=offsets)
    scaled = down.float() * topk_weights.flatten()[order, None]
    if local < spec.num_experts:
        scaled = scaled.where(ordered[:, None] < local, 0.0)
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    return out.index_add_(0, token, scaled).to(torch.bfloat16)


def vllm_layer(spec: LayerSpec, device: torch.device) -> Layer:
    """vLLM's fused experts, with the configuration that it chooses itself. Raises ``ImportError`` without vLLM."""
    from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]

    placed: dict[str, Any] = {}
    if spec.num_local_experts < spec.num_experts:
        places = torch.full((spec.num_experts,), -1, dtype=torch.int32, device=device)
        places[spec.local_expert_offset : spec.local_expert_end] = torch.arange(spec.num_local_experts)
        placed = {"expert_map": places, "global_num_experts": spec.num_experts}

    def layer(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: LayerWeights) -> Tensor:
        out: Tensor = fused_experts(hidden, weights.gate_up, weights.down, topk_weights, topk_ids, **placed)
        return out

    return layer


def importable(spec: LayerSpec, device: torch.device) -> tuple[dict[str, Layer], dict[str, str]]:
    """The peers that can run ``spec`` here, by name, and why the others cannot."""
    if device.type != "cuda":
        return {}, dict.fromkeys(NAMES, "this torch has no CUDA")
    if spec.holds_shared_experts:
        return {}, dict.fromkeys(NAMES, "it has no shared experts")
    torch_name, vllm_name = NAMES
    found: dict[str, Layer] = {torch_name: partial(grouped_mm, spec=spec)}
    try:
        found[vllm_name] = vllm_layer(spec, device)
    except ImportError as error:
        return found, {vllm_name: str(error)}
    return found, {}


@dataclass(frozen=True, slots=True)
class PeerRun:
    """A peer's graph over several forwards, and the outputs that a replay leaves."""

    replay: Callable[[], None]
    outputs: Sequence[Tensor]


def captured(rig: Rig, layer: Layer, sets: Sequence[WeightSet], batches: Sequence[LayerBatch]) -> PeerRun:
    """One forward for each batch, in turn over ``sets``, in one graph that replays on the rig's main stream."""
    device = rig.torch_device
    inputs = [
        (batch.hidden_states.to(device), _sent(batch.topk_ids, device), _sent(batch.topk_weights, device))
        for batch in batches
    ]
    outputs = [torch.full_like(hidden, torch.nan) for hidden, _, _ in inputs]

    def forward_all() -> None:
        for index, (tensors, out) in enumerate(zip(inputs, outputs, strict=True)):
            out.copy_(layer(*tensors, sets[index % len(sets)].weights))

    warm = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    warm.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(warm):
        forward_all()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        forward_all()
    for out in outputs:
        out.fill_(torch.nan)
    torch.cuda.synchronize(device)
    main = torch.cuda.ExternalStream(int(rig.streams.main), device=device)  # type: ignore[no-untyped-call]

    def replay() -> None:
        with torch.cuda.stream(main):
            graph.replay()

    return PeerRun(replay, outputs)


def _sent(tensor: Tensor | None, device: torch.device) -> Tensor:
    assert tensor is not None
    return tensor.to(device)


def peer_rows(
    rig: Rig,
    layers: dict[str, Layer],
    absent: dict[str, str],
    sets: Sequence[WeightSet],
    batches: Sequence[LayerBatch],
    truths: Sequence[Tensor],
    replays: int,
) -> list[dict[str, Any]]:
    """A row for each of ``layers``: its name, its times, and the largest error over the first of ``truths``.

    One that fails moves from ``layers`` to ``absent``, with what it said.
    """
    rows = []
    for name, layer in list(layers.items()):
        try:
            run = captured(rig, layer, sets, batches)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            absent[name] = " ".join(str(error).split())[:300]
            del layers[name]
            continue
        timing = rig.time(run.replay, replays=replays, forwards=len(batches))
        errors = [relative_error(out.cpu(), truth) for out, truth in zip(run.outputs, truths, strict=False)]
        rows.append({"peer": name, **timing.row(), "error": worst(errors)})
    return rows
