"""Loads an adapter: a PEFT folder of any layout becomes canonical tensors per layer, or is refused with a reason."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .adapter import Adapter, LayerAdapter, LoraWeights
from .adapter_config import read_adapter_config
from .adapter_files import AdapterFolder
from .adapter_keys import LoraPair, ModulePlace, pair_up
from .adapter_modules import Projections, Source, dimensions, read_modules
from .adapter_stacked import PackedPair, find_packed, read_packed, read_stacked
from .adapter_tensors import WEIGHTS
from .errors import AdapterRefusedError
from .spec import LayerSpec, ModelSpec, ranges


def load_adapter(path: Path, model: ModelSpec, *, max_rank: int, root: Path | None = None) -> Adapter:
    """The adapter in the folder ``path``, read against ``model`` whole, or not at all.

    ``max_rank``  the largest rank of a projection that is accepted
    ``root``      how far links in the folder may lead, by default not out of the folder

    Every expert of the base is read, also those that an expert-parallel slice does not hold. Every
    tensor of the file is used, or is in ``ignored_keys`` because what it belongs to is not served.
    Raises ``AdapterNotFoundError`` for a missing folder or ``adapter_config.json``, and
    ``AdapterRefusedError`` with key, expectation and finding for everything else.
    """
    folder = AdapterFolder(path, root)
    config = read_adapter_config(folder.read_config())
    with folder.open_weights() as file:
        pairs, ignored = pair_up(file.tensors.values(), model)
        if not pairs:
            raise AdapterRefusedError(
                WEIGHTS,
                f"LoRA on an expert of a served layer ({ranges(model.layers)})",
                f"none: its {len(ignored)} tensors belong to other modules",
            )
        source = Source(file, config, max_rank)
        wrapped = [pair for pair in pairs if pair.place.projection is None]
        packed = {found.pair.place: found for found in find_packed(wrapped, model, config)}
        by_layer: dict[int, list[LoraPair]] = {}
        for pair in pairs:
            by_layer.setdefault(pair.place.layer, []).append(pair)
        layers = {
            index: _read_layer(source, model.layers[index], by_layer[index], packed) for index in sorted(by_layer)
        }
    return Adapter(
        path=path,
        rank=config.rank,
        lora_alpha=config.lora_alpha,
        scaling=config.scaling,
        layers=layers,
        ignored_keys=ignored,
    )


def _read_layer(
    source: Source, spec: LayerSpec, pairs: Iterable[LoraPair], packed: Mapping[ModulePlace, PackedPair]
) -> LayerAdapter:
    found: dict[str, LoraWeights] = {}
    for pair, projections in _parts(source, spec, pairs, packed):
        for name, weights in projections:
            if name in found:
                raise AdapterRefusedError(pair.a.key, f"one layout for {name} of layer {spec.index}", "two")
            found[name] = weights
    return LayerAdapter(**found)


def _parts(
    source: Source, spec: LayerSpec, pairs: Iterable[LoraPair], packed: Mapping[ModulePlace, PackedPair]
) -> Iterator[tuple[LoraPair, Projections]]:
    """What is stored together: a pair of it for messages, and the projections that it holds."""
    modules: dict[tuple[str, bool], dict[int, LoraPair]] = {}
    for pair in pairs:
        place = pair.place
        if place.projection is None:
            yield pair, read_packed(source, spec, packed[place])
        elif place.shared or place.expert is not None:
            modules.setdefault((place.projection, place.shared), {})[place.expert or 0] = pair
        else:
            yield pair, read_stacked(source, spec, pair, place.projection)
    for (projection, shared), by_expert in modules.items():
        pair = next(iter(by_expert.values()))
        if shared and not spec.shared_intermediate_size:
            raise AdapterRefusedError(pair.a.key, "a base with shared experts", f"none in layer {spec.index}")
        size = dimensions(spec, projection, shared=shared)
        yield pair, read_modules(source, size, by_expert, 1 if shared else spec.num_experts)
