"""What ``moelet inspect`` tells of a checkpoint or an adapter: plain data, ``dataclasses.asdict`` of it is JSON."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .adapter import Adapter, LayerAdapter, LoraWeights
from .spec import LayerSpec, ModelSpec, RoutingMethod, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """One MoE layer that is served: its sizes, how it routes, and its bytes.

    ``weight_bytes``  on the host, as loaded
    """

    index: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_local_experts: int
    local_expert_offset: int
    top_k: int
    shared_intermediate_size: int
    shared_gated: bool
    routing: str
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedLayers:
    """Layers that are not served (``"0-2,7"``) and why."""

    layers: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """A checkpoint layer by layer; ``weight_bytes`` is the sum over ``layers``."""

    name: str
    model_type: str
    path: str
    num_hidden_layers: int
    layers: tuple[LayerReport, ...]
    skipped: tuple[SkippedLayers, ...]
    notes: tuple[str, ...]
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionReport:
    """What an adapter does to one projection of one layer.

    ``num_experts`` of ``of_experts`` are changed, at true ranks ``min_rank .. max_rank`` and scalings
    ``min_scaling .. max_scaling``; ``shared`` says which matrix serves all experts: ``"A"``, ``"B"``, or neither.
    """

    name: str
    in_features: int
    out_features: int
    num_experts: int
    of_experts: int
    min_rank: int
    max_rank: int
    min_scaling: float
    max_scaling: float
    shared: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayerReport:
    """The projections that an adapter changes in layer ``index``."""

    index: int
    projections: tuple[ProjectionReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredKeys:
    """``count`` tensor keys like ``pattern``, numbers in it written ``*``, and why nothing is done with them."""

    pattern: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReport:
    """An adapter layer by layer; with a base, ``base`` is its name and ``refused`` says why it does not fit."""

    path: str
    rank: int
    max_rank: int
    lora_alpha: float
    scaling: float
    layout: str
    targets: tuple[str, ...]
    bytes: int
    layers: tuple[AdapterLayerReport, ...]
    ignored: tuple[IgnoredKeys, ...]
    base: str | None
    refused: tuple[str, ...]


def checkpoint_report(model: ModelSpec, layer_nbytes: Mapping[int, int], notes: Sequence[str]) -> CheckpointReport:
    """What serving ``model`` means; ``layer_nbytes`` maps every served layer to ``LayerWeights.nbytes``."""
    layers = tuple(_layer_report(model.layers[index], layer_nbytes[index]) for index in sorted(model.layers))
    return CheckpointReport(
        name=model.name,
        model_type=model.model_type,
        path=str(model.path),
        num_hidden_layers=model.num_hidden_layers,
        layers=layers,
        skipped=tuple(_skipped(model)),
        notes=tuple(notes),
        weight_bytes=sum(layer.weight_bytes for layer in layers),
    )


def adapter_report(adapter: Adapter, model: ModelSpec | None = None) -> AdapterReport:
    """What ``adapter`` changes, and whether it fits ``model``, when there is one."""
    return AdapterReport(
        path=str(adapter.path),
        rank=adapter.rank,
        max_rank=adapter.max_rank,
        lora_alpha=adapter.lora_alpha,
        scaling=adapter.scaling,
        layout=str(adapter.layout),
        targets=adapter.targets,
        bytes=adapter.nbytes,
        layers=tuple(_adapter_layer_report(index, adapter.layers[index]) for index in sorted(adapter.layers)),
        ignored=tuple(_ignored(adapter.ignored_keys, model)),
        base=None if model is None else model.name,
        refused=() if model is None else tuple(_misfits(adapter, model)),
    )


def routing_in_words(spec: LayerSpec) -> str:
    """The routing method of a layer as a sentence fragment."""
    routing, best = spec.routing, f"the best {spec.top_k} of {spec.num_experts} experts"
    weights = "weights divided by their sum" if routing.renormalize else "weights not renormalised"
    match routing.method:
        case RoutingMethod.SOFTMAX_TOPK:
            words = f"softmax over all experts, then {best}, {weights}"
        case RoutingMethod.TOPK_SOFTMAX:
            words = f"{best} by logit, then softmax over those"
        case RoutingMethod.SIGMOID_GROUPED:
            bias = " plus a correction bias" if routing.has_correction_bias else ""
            groups = f" within the best {routing.topk_groups} of {routing.num_groups} groups"
            words = f"{best} by sigmoid{bias}{groups if routing.num_groups > 1 else ''}, {weights}"
    scale = routing.routed_scaling_factor
    return words if scale == 1.0 else f"{words}, times {scale:g}"


def _layer_report(spec: LayerSpec, weight_bytes: int) -> LayerReport:
    return LayerReport(
        index=spec.index,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_experts=spec.num_experts,
        num_local_experts=spec.num_local_experts,
        local_expert_offset=spec.local_expert_offset,
        top_k=spec.top_k,
        shared_intermediate_size=spec.shared_intermediate_size,
        shared_gated=spec.shared_gated,
        routing=routing_in_words(spec),
        weight_bytes=weight_bytes,
    )


def _skipped(model: ModelSpec) -> Iterator[SkippedLayers]:
    for reason in dict.fromkeys(model.skipped.values()):
        yield SkippedLayers(layers=ranges([i for i, why in model.skipped.items() if why == reason]), reason=reason)


def _adapter_layer_report(index: int, layer: LayerAdapter) -> AdapterLayerReport:
    return AdapterLayerReport(
        index=index, projections=tuple(_projection_report(name, weights) for name, weights in layer.items())
    )


def _projection_report(name: str, weights: LoraWeights) -> ProjectionReport:
    changed = weights.ranks > 0
    ranks: list[int] = weights.ranks[changed].tolist() or [0]
    scalings: list[float] = weights.scaling[changed].tolist() or [0.0]
    of_experts = len(weights.ranks)
    sides = (("A", weights.a), ("B", weights.b))
    return ProjectionReport(
        name=name,
        in_features=weights.a.shape[2],
        out_features=weights.b.shape[1],
        num_experts=int(changed.sum()),
        of_experts=of_experts,
        min_rank=min(ranks),
        max_rank=max(ranks),
        min_scaling=min(scalings),
        max_scaling=max(scalings),
        shared="".join(side for side, tensor in sides if of_experts > 1 and tensor.shape[0] == 1),
        bytes=weights.nbytes,
    )


def _ignored(keys: Sequence[str], model: ModelSpec | None) -> Iterator[IgnoredKeys]:
    counts = Counter((re.sub(r"(?<=\.)\d+(?=\.)", "*", key), _why_ignored(key, model)) for key in keys)
    for (pattern, reason), count in counts.items():
        yield IgnoredKeys(pattern=pattern, count=count, reason=reason)


def _why_ignored(key: str, model: ModelSpec | None) -> str:
    layer = re.search(r"\blayers\.(\d+)\.(?=.*experts?\.)", key)
    index = int(layer[1]) if layer else -1
    if model is not None and index in model.skipped:
        return f"layer {index} is not served: {model.skipped[index]}"
    return "it belongs to a module that is not an expert of a served MoE layer"


def _misfits(adapter: Adapter, model: ModelSpec) -> Iterator[str]:
    for index in sorted(adapter.layers):
        spec = model.layers.get(index)
        if spec is None:
            why = model.skipped.get(index, "there is no such layer")
            yield f"layer {index}: it is not served: {why}"
            continue
        for name, weights in adapter.layers[index].items():
            expected = _expected_sizes(name, spec)
            found = (len(weights.ranks), weights.b.shape[1], weights.a.shape[2])
            if found != expected:
                yield f"layer {index} {name}: expected [experts, out, in] {list(expected)}, found {list(found)}"


def _expected_sizes(projection: str, spec: LayerSpec) -> tuple[int, int, int]:
    shared = projection.startswith("shared_")
    experts = 1 if shared else spec.num_experts
    width = spec.shared_intermediate_size if shared else spec.intermediate_size
    hidden = spec.hidden_size
    return (experts, hidden, width) if projection.endswith("down") else (experts, width, hidden)
