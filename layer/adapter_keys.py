"""What a tensor's key says: its layer, expert and projection, and whether it is an A or a B."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .adapter_tensors import StoredTensor
from .errors import AdapterRefusedError
from .naming import PREFIXES
from .spec import ModelSpec

_NUMBER = r"0|[1-9][0-9]{0,5}"
_LAYER = re.compile(rf"((?:[^.]+\.)*?)layers\.({_NUMBER})\.(.+)")
_BLOCK = re.compile(r"(?:mlp|block_sparse_moe)\.(.+)")
_OF_EXPERTS = re.compile(r"(?:^|\.)(?:experts?|shared_experts?|block_sparse_moe|mlp\.gate|shared_expert_gate)\.")
_SIDE = re.compile(r"(.+)\.lora_([AB])\.weight")
_PROJECTION = r"(?P<projection>gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3)"
_ROUTED = re.compile(rf"experts(?:\.(?P<expert>{_NUMBER}))?\.{_PROJECTION}")
_PACKED = re.compile(r"experts(?P<wraps>(?:\.base_layer)*)")
_SHARED = re.compile(rf"shared_experts?\.{_PROJECTION}")

_PROJECTIONS = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
    "gate_up_proj": "gate_up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlace:
    """Where a module with LoRA sits: ``projection`` is ``gate``, ``up``, ``down`` or ``gate_up``.

    ``expert`` is None for modules of all experts at once and for ``shared`` experts. A parameter
    that PEFT wrapped has ``projection`` None, as its key does not say which it is, and ``depth``
    counts the wrappers around it.
    """

    layer: int
    shared: bool = False
    expert: int | None = None
    projection: str | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """A and B of one module as stored; ``module`` is its name as the patterns know it."""

    place: ModulePlace
    module: str
    a: StoredTensor
    b: StoredTensor


def pair_up(tensors: Iterable[StoredTensor], model: ModelSpec) -> tuple[list[LoraPair], tuple[str, ...]]:
    """The A/B pairs on experts of ``model``'s layers, and the keys of everything that is not served.

    Raises ``AdapterRefusedError`` for a key that is neither, one half of a pair, or a pair given twice.
    """
    halves: dict[ModulePlace, dict[str, tuple[str, StoredTensor]]] = {}
    ignored = []
    for stored in tensors:
        found = _parse(stored.key, model)
        if found is None:
            ignored.append(stored.key)
            continue
        place, module, side = found
        other = halves.setdefault(place, {}).setdefault(side, (module, stored))[1]
        if other is not stored:
            raise AdapterRefusedError(stored.key, "each LoRA once", f"the same as {other.key}")
    return [_pair(place, sides) for place, sides in halves.items()], tuple(ignored)


def _pair(place: ModulePlace, sides: dict[str, tuple[str, StoredTensor]]) -> LoraPair:
    for side, other in ("AB", "BA"):
        if side not in sides:
            key = sides[other][1].key
            raise AdapterRefusedError(key, f"a lora_{side} beside this lora_{other}", "none")
    (module, a), (other_module, b) = sides["A"], sides["B"]
    if module != other_module:
        raise AdapterRefusedError(b.key, f"the lora_B of {module}", f"that of {other_module}")
    return LoraPair(place=place, module=module, a=a, b=b)


def _parse(key: str, model: ModelSpec) -> tuple[ModulePlace, str, str] | None:
    """(place, module's name, side) of a key; None where it belongs to nothing that is served."""
    name = key.removeprefix("base_model.model.")
    split = _LAYER.fullmatch(name)
    if split is None or split[1] not in PREFIXES:
        if _OF_EXPERTS.search(name):
            known = ", ".join(f"{prefix}layers." for prefix in PREFIXES)
            raise AdapterRefusedError(key, f"a key that starts with one of {known}", f"{name.partition('.layers.')[0]}")
        return None
    layer = int(split[2])
    if layer in model.skipped:
        return None
    if layer not in model.layers:
        raise AdapterRefusedError(key, f"a layer of the base, which has {model.num_hidden_layers}", f"layer {layer}")
    block = _BLOCK.fullmatch(split[3])
    if block is None:
        if _OF_EXPERTS.search(split[3]):
            raise AdapterRefusedError(key, "experts under mlp or block_sparse_moe", split[3].partition(".experts")[0])
        return None
    place, side = _parse_block(key, layer, block[1])
    return place, name.rpartition(".lora_")[0].replace(".base_layer", ""), side


def _parse_block(key: str, layer: int, rest: str) -> tuple[ModulePlace, str]:
    """Place and side of a key of a MoE block, ``rest`` being what follows the block's name."""
    if rest.startswith(("gate.", "router.")):
        raise AdapterRefusedError(key, "no change of the router", "one")
    if rest.startswith("shared_expert_gate."):
        raise AdapterRefusedError(key, "no change of the shared expert's gate", "one")
    split = _SIDE.fullmatch(rest)
    if split is None:
        raise AdapterRefusedError(key, "the lora_A.weight or lora_B.weight of an expert", _what(rest))
    if routed := _ROUTED.fullmatch(split[1]):
        expert = None if routed["expert"] is None else int(routed["expert"])
        return ModulePlace(layer=layer, expert=expert, projection=_PROJECTIONS[routed["projection"]]), split[2]
    if packed := _PACKED.fullmatch(split[1]):
        return ModulePlace(layer=layer, depth=packed["wraps"].count(".")), split[2]
    if shared := _SHARED.fullmatch(split[1]):
        return ModulePlace(layer=layer, shared=True, projection=_PROJECTIONS[shared["projection"]]), split[2]
    raise AdapterRefusedError(key, "LoRA on gate_proj, up_proj, down_proj or gate_up_proj of experts", f"on {split[1]}")


def _what(rest: str) -> str:
    if "lora_magnitude_vector" in rest:
        return "DoRA's magnitudes"
    if rest.endswith(".bias"):
        return "a bias"
    return "another tensor of a MoE block"
