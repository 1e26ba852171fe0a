"""Which stored tensor goes where: the keys of a MoE layer on disk and their places in ``LayerWeights``."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .errors import UnsupportedCheckpointError
from .families import Family
from .shards import StoredTensor
from .spec import LayerSpec

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""What may stand before ``layers.{i}.``: causal language models, composite models, bare backbones."""

_QUANTISED = re.compile(
    r"(_scale_inv|_scales?|_blocks|_packed|_zero_point|[._](qweight|qzeros|g_idx|absmax|quant_map))$"
)
_FULL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One stored tensor and its place: ``weights.<target>[place] = stored[rows]``, transposed or not.

    ``shape`` is what the stored tensor must have.
    """

    key: str
    shape: tuple[int, ...]
    target: str
    place: tuple[int | slice, ...] = (_FULL,)
    rows: slice = field(default_factory=lambda: _FULL)
    transposed: bool = False


def layer_of(key: str) -> str:
    """``"model.layers.3."`` of ``"model.layers.3.mlp.gate.weight"``; empty for keys of no layer."""
    match = re.match(r"(.*?\b)?layers\.\d+\.", key)
    return match.group() if match else ""


def find_block(layers: Mapping[str, Collection[str]], family: Family, index: int) -> str:
    """The key prefix of layer ``index``'s MoE block, such as ``"model.layers.3.mlp."``.

    ``layers`` holds the keys of each layer by ``layer_of``. Raises ``UnsupportedCheckpointError``
    if no known prefix has a router there.
    """
    tried = [f"{prefix}layers.{index}." for prefix in PREFIXES]
    for layer in tried:
        for block in family.blocks:
            if f"{layer}{block}.gate.weight" in layers.get(layer, ()):
                return f"{layer}{block}."
    raise UnsupportedCheckpointError(
        f"layer {index} should be a MoE layer, but there is no tensor {tried[0]}{family.blocks[0]}.gate.weight"
    )


def layer_pieces(spec: LayerSpec, family: Family, block: str, stored: Mapping[str, StoredTensor]) -> list[Piece]:
    """The pieces that make up the layer, every tensor of the block used or known to lie elsewhere.

    ``stored`` describes the tensors under ``block``. Raises ``UnsupportedCheckpointError`` naming
    the tensor that is missing, of another shape, quantised, or not understood.
    """
    _refuse_quantised(stored)
    pieces = []
    for piece in _all_pieces(spec, family, block, stored):
        _expect(stored, piece.key, piece.shape)
        pieces.append(piece)
    if unknown := stored.keys() - {piece.key for piece in pieces}:
        raise UnsupportedCheckpointError(
            f"layer {spec.index}: {min(unknown)} is not a tensor that a {block}* of this family has"
        )
    local = range(spec.local_expert_offset, spec.local_expert_end)
    return [piece for piece in (_localised(piece, local, spec) for piece in pieces) if piece is not None]


def _all_pieces(spec: LayerSpec, family: Family, block: str, stored: Mapping[str, StoredTensor]) -> Iterator[Piece]:
    yield from _router(spec, block)
    if f"{block}experts.gate_up_proj" in stored:
        yield from _fused(spec, block, stored)
    else:
        yield from _per_expert(spec, family, block)
    yield from _shared(spec, family, block)


def _refuse_quantised(stored: Mapping[str, StoredTensor]) -> None:
    for key, tensor in stored.items():
        if _QUANTISED.search(key) or tensor.dtype not in ("BF16", "F16", "F32", "F64"):
            raise UnsupportedCheckpointError(
                f"the checkpoint is quantised: {key} is {tensor.dtype}; only bf16, fp16 and fp32 weights are served"
            )


def _expect(stored: Mapping[str, StoredTensor], key: str, shape: tuple[int, ...]) -> None:
    if key not in stored:
        raise UnsupportedCheckpointError(f"the checkpoint has no tensor {key}, expected one of shape {list(shape)}")
    if stored[key].shape != shape:
        raise UnsupportedCheckpointError(
            f"{key} should have shape {list(shape)} by config.json, found {list(stored[key].shape)}"
        )


def _router(spec: LayerSpec, block: str) -> Iterator[Piece]:
    yield Piece(key=f"{block}gate.weight", shape=(spec.num_experts, spec.hidden_size), target="router")
    if spec.routing.has_correction_bias:
        yield Piece(key=f"{block}gate.e_score_correction_bias", shape=(spec.num_experts,), target="correction_bias")


def _per_expert(spec: LayerSpec, family: Family, block: str) -> Iterator[Piece]:
    for expert in range(spec.num_experts):
        yield from _gated_mlp(spec, family, f"{block}experts.{expert}.", ("gate_up", "down"), expert)


def _shared(spec: LayerSpec, family: Family, block: str) -> Iterator[Piece]:
    if not spec.shared_intermediate_size:
        return
    yield from _gated_mlp(spec, family, f"{block}{family.shared_name}.", ("shared_gate_up", "shared_down"), None)
    if spec.shared_gated:
        yield Piece(key=f"{block}{family.shared_name}_gate.weight", shape=(1, spec.hidden_size), target="shared_gate")


def _gated_mlp(
    spec: LayerSpec, family: Family, prefix: str, targets: tuple[str, str], expert: int | None
) -> Iterator[Piece]:
    """Gate, up and down of one expert (of the shared experts where ``expert`` is None)."""
    hidden = spec.hidden_size
    width = spec.intermediate_size if expert is not None else spec.shared_intermediate_size
    gate, up, down = (f"{prefix}{name}.weight" for name in family.projections)
    row = () if expert is None else (expert,)
    yield Piece(key=gate, shape=(width, hidden), target=targets[0], place=(*row, slice(0, width)))
    yield Piece(key=up, shape=(width, hidden), target=targets[0], place=(*row, slice(width, 2 * width)))
    yield Piece(key=down, shape=(hidden, width), target=targets[1], place=(*row, _FULL))


def _fused(spec: LayerSpec, block: str, stored: Mapping[str, StoredTensor]) -> Iterator[Piece]:
    """``gate_up_proj`` and ``down_proj`` of all experts, each ``[E, out, in]`` or both ``[E, in, out]``."""
    experts, hidden, width = spec.num_experts, spec.hidden_size, spec.intermediate_size
    keys = {"gate_up": f"{block}experts.gate_up_proj", "down": f"{block}experts.down_proj"}
    plain = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
    transposed = _is_transposed(stored, {keys[name]: plain[name] for name in keys})
    for name, key in keys.items():
        shape = (experts, *reversed(plain[name][1:])) if transposed else plain[name]
        yield Piece(key=key, shape=shape, target=name, transposed=transposed)


def _is_transposed(stored: Mapping[str, StoredTensor], plain: Mapping[str, tuple[int, ...]]) -> bool:
    """Which of the two orientations the fused tensors have, told by those that are not square.

    Both square would need H = I = 2I, so one always tells; if they disagree, nothing is guessed.
    """
    verdicts = set()
    for key, (experts, out_size, in_size) in plain.items():
        found = stored[key].shape if key in stored else None
        if out_size == in_size:
            continue
        if found == (experts, out_size, in_size):
            verdicts.add(False)
        elif found == (experts, in_size, out_size):
            verdicts.add(True)
    if len(verdicts) > 1:
        shapes = {key: list(stored[key].shape) for key in plain}
        raise UnsupportedCheckpointError(f"the orientation of the fused experts is ambiguous: {shapes}")
    return verdicts == {True}


def _localised(piece: Piece, local: range, spec: LayerSpec) -> Piece | None:
    """``piece`` as an expert-parallel slice holds it: None, or only the rows of local experts."""
    if piece.target.startswith("shared_"):
        return piece if spec.holds_shared_experts else None
    if piece.target not in ("gate_up", "down"):
        return piece
    first = piece.place[0]
    if not isinstance(first, int):
        return replace(piece, rows=slice(local.start, local.stop))
    return replace(piece, place=(first - local.start, *piece.place[1:])) if first in local else None


def group_by_layer(keys: Iterable[str]) -> dict[str, set[str]]:
    """Tensor keys by ``layer_of``."""
    layers: dict[str, set[str]] = {}
    for key in keys:
        layers.setdefault(layer_of(key), set()).add(key)
    return layers
