"""The engine on the GPU: layers resident, every decode shape captured, adapters in slots of fixed address."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layer.adapter import KeptAdapter
from ..layer.engine import Finished, Forward, LayerBatch, check_slot
from ..layer.errors import RequestError
from ..layer.spec import ModelSpec
from ..layer.weights import LayerWeights
from .adapters import AdapterSlots, SlotBank
from .arrival import Arrival
from .compiler import check_driver
from .driver import Device, open_device
from .fetching import Fetching
from .geometry import Geometry
from .input_memory import InputMemory
from .kernels import Kernels, Progress, fetch
from .limits import check_limits
from .memory import DeviceBuffer
from .options import GraphOptions
from .page_locked import PageLocked
from .plan_choice import Choice, choose
from .pool import EAGER_PLAN, GraphPool, arena_memory
from .residency import ResidentLayer, router_matrix
from .served import Served, ways
from .staging import Staging, routing_input
from .streams import Events, Streams
from .unfinalized import Unfinalized, read_unfinalized


class GraphEngine:
    """``Engine`` over captured CUDA graphs on GPU ``ordinal``; see ``layer/engine.py`` for the calls.

    ``add_layer`` takes the weights of each layer, then ``start`` captures; afterwards nothing is allocated, compiled
    or created. Raises ``DeviceUnavailableError``, ``ConfigurationError``, ``DriverError`` and ``CompileError``.

    ``depth``: while one forward computes, the next is copied in and queued behind it.
    """

    depth = 2
    begins_at_once = True

    def __init__(self, model: ModelSpec, options: GraphOptions | None = None, *, ordinal: int = 0) -> None:
        self._model = model
        self._options = options or GraphOptions()
        self._shapes = self._options.shapes
        self._device: Device = open_device(ordinal)
        check_driver(self._device)
        self._kernels = Kernels(self._device.arch, self._device.max_shared_memory)
        self._streams, self._events = Streams(), Events()
        self._layers: dict[int, ResidentLayer] = {}
        self._slots: dict[int, AdapterSlots] = {}
        self._pools: dict[Geometry, GraphPool] = {}
        self._stagings: dict[Geometry, Staging] = {}
        self._served: dict[int, Served] = {}
        self._memory: DeviceBuffer | None = None
        self._bank: SlotBank | None = None
        self._inputs: InputMemory | None = None
        self._latest: Arrival | None = None

    def add_layer(self, index: int, weights: LayerWeights) -> None:
        """Pack one layer onto the GPU and make its adapter slots."""
        spec = self._model.layer(index)
        geometry = self._geometry(index, router_fp32=router_matrix(weights).dtype == torch.float32)
        layer = ResidentLayer(spec, geometry, weights, self._device.ordinal)
        self._layers[index] = layer
        if geometry.max_loras:
            self._slots[index] = AdapterSlots(spec, geometry)
            self._slots[index].fill_args(layer.args)

    def start(self, progress: Progress | None = None) -> None:
        """Compile every kernel, and capture every decode shape of every geometry; layers of one geometry share them."""
        geometries = list({layer.geometry: None for layer in self._layers.values()})
        self._memory = arena_memory(geometries, self._shapes, self._options.eager_tokens)
        self._memory.fill(0, self._streams.main)
        self._pools = {geometry: self._pool(geometry, self._memory) for geometry in geometries}
        asked = [specialisation for pool in self._pools.values() for specialisation in pool.kernels_asked()]
        self._kernels.compile([fetch(), *asked], progress)
        page_locked = PageLocked()
        fetching = Fetching(self._kernels.get(fetch()), self._streams.main, self._device.sm_count)
        for geometry, pool in self._pools.items():
            gc.collect()
            pool.prepare(progress)
            self._stagings[geometry] = Staging(
                geometry,
                pool.most_tokens,
                kept_tokens=self.batch_tokens,
                depth=self.depth,
                enter=self._device.make_current,
                streams=self._streams,
                fetching=fetching,
                page_locked=page_locked,
            )
        found = {each: ways(self._pools[each], self._stagings[each]) for each in geometries}
        for index, layer in self._layers.items():
            pool, staging = self._pools[layer.geometry], self._stagings[layer.geometry]
            self._served[index] = Served(layer.head, pool.most_tokens, staging, found[layer.geometry])
        self._inputs = InputMemory(geometries, self.batch_tokens)
        self._kernels.seal()
        if self._slots:
            self._bank = SlotBank(self._slots, self._options.max_lora_rank, self._streams.copy)
        self._streams.synchronize()

    @property
    def model(self) -> ModelSpec:
        """What is served."""
        return self._model

    @property
    def device(self) -> str:
        """``"cuda:N"``."""
        return f"cuda:{self._device.ordinal}"

    @property
    def max_loras(self) -> int:
        """Number of adapter slots."""
        return self._options.max_loras

    @property
    def max_lora_rank(self) -> int:
        """The largest adapter rank that a slot holds."""
        return self._options.max_lora_rank

    @property
    def batch_tokens(self) -> int:
        """The decode limit: more tokens run eagerly."""
        return self._shapes[-1]

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest shape of every layer."""
        return min(pool.most_tokens for pool in self._pools.values())

    def begin(self, batch: LayerBatch) -> Forward:
        """Start a forward; see ``Engine.begin``. One of more tokens than run at once is finished when this returns."""
        self._device.make_current()
        spec = self._model.layer(batch.layer)
        lora = batch.check(spec, self._options.max_loras)
        tokens, served = batch.num_tokens, self._served[batch.layer]
        if 0 < tokens <= served.most_tokens:
            return self._begin(batch, tokens, served, lora)
        if tokens == 0:
            return Finished(batch.hidden_states.new_empty(0, spec.hidden_size))
        parts = [batch.part(start, start + served.most_tokens) for start in range(0, tokens, served.most_tokens)]
        outputs = [self._begin(part, part.num_tokens, served, part.any_adapter).result() for part in parts]
        return Finished(torch.cat(outputs))

    def forward(self, batch: LayerBatch) -> Tensor:
        """The layer's output, bf16 ``[T, H]``; see ``Engine.forward``."""
        return self.begin(batch).result()

    def input_memory(self, num_bytes: int) -> memoryview | None:
        """Page-locked memory, of which forwards read hidden states where they are; see ``Engine``."""
        return self._inputs.take(num_bytes) if self._inputs else None

    def forward_unfinalized(self, batch: LayerBatch) -> Unfinalized:
        """The forward before its last step, for callers that combine expert outputs themselves.

        Raises as ``forward`` does, and ``RequestError`` for a batch that does not fit into one forward.
        """
        self._device.make_current()
        lora = batch.check(self._model.layer(batch.layer), self.max_loras)
        served = self._served[batch.layer]
        if not 0 < batch.num_tokens <= served.most_tokens:
            raise RequestError(f"1 to {served.most_tokens} tokens can stay unfinalized, got {batch.num_tokens}")
        runnable, transfer = served.way(batch.num_tokens, routing_input(batch), lora)
        served.staging.send(batch, served.head, transfer, self._streams.main)
        runnable.run(self._streams.main)
        self._streams.main.synchronize()
        return read_unfinalized(self._layers[batch.layer].geometry, batch, runnable)

    def _begin(self, batch: LayerBatch, tokens: int, served: Served, lora: bool) -> Arrival:
        runnable, transfer = served.way(tokens, routing_input(batch), lora)
        staging, main = served.staging, self._streams.main
        beside = self._latest is not None and self._latest.under_way
        staging.send(batch, served.head, transfer, main, beside=beside, direct=True)
        runnable.run(main)
        self._latest = staging.begin_receive(transfer, main)
        return self._latest

    def install_adapter(self, slot: int, adapter: KeptAdapter) -> None:
        """Put ``adapter``, best a ``PackedAdapter``, into ``slot``, over the copy stream; see ``Engine``."""
        bank = self._slot_bank(slot)
        self._device.make_current()
        bank.install(slot, adapter)

    def remove_adapter(self, slot: int) -> None:
        """Leave ``slot`` empty; see ``Engine``."""
        bank = self._slot_bank(slot)
        self._device.make_current()
        bank.remove(slot)

    def plans(self, layer: int) -> Sequence[Mapping[str, Any]]:
        """The plan of every captured shape of ``layer``, and of what runs eagerly."""
        self._model.layer(layer)
        geometry = self._layers[layer].geometry
        choices = {shape: self._choice(geometry, shape) for shape in self._shapes}
        eager = Choice(EAGER_PLAN, f"more than {self._shapes[-1]} tokens run eagerly on one stream")
        choices[self._pools[geometry].most_tokens] = eager
        return [
            {"tokens": shape, "captured": choice is not eager, "plan": choice.plan.value, "why": choice.why}
            for shape, choice in choices.items()
        ]

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """GPU bytes by use: weights, adapter slots, the shared arena, and what the graphs took beside it."""
        return {
            "weights": sum(layer.num_bytes for layer in self._layers.values()),
            "adapter_slots": sum(slots.num_bytes for slots in self._slots.values()),
            "arena": self._memory.num_bytes if self._memory else 0,
            "graphs": sum(pool.graph_bytes for pool in self._pools.values()),
        }

    def close(self) -> None:
        """Free everything."""
        self._streams.synchronize()
        closing: list[Any] = [*self._pools.values(), *self._stagings.values(), *self._layers.values()]
        closing += [self._bank] if self._bank else self._slots.values()
        closing += [owned for owned in (self._memory, self._inputs) if owned]
        for owned in (*closing, self._kernels, self._events, self._streams):
            owned.close()
        self._device.close()

    def _choice(self, geometry: Geometry, tokens: int) -> Choice:
        if self._options.plan is not None:
            return Choice(self._options.plan, "asked for by --plan")
        return choose(self._device.name, geometry, tokens)

    def _geometry(self, index: int, *, router_fp32: bool) -> Geometry:
        options = self._options
        geometry = Geometry.of(
            self._model.layer(index),
            router_fp32=router_fp32,
            max_loras=options.max_loras,
            max_lora_rank=options.max_lora_rank,
        )
        check_limits(geometry, self._shapes[-1] + 1, self._device.max_shared_memory)
        return geometry

    def _pool(self, geometry: Geometry, memory: DeviceBuffer) -> GraphPool:
        return GraphPool(
            geometry,
            self._shapes,
            self._options.eager_tokens,
            kernels=self._kernels,
            streams=self._streams,
            events=self._events,
            sm_count=self._device.sm_count,
            plans={shape: self._choice(geometry, shape).plan for shape in self._shapes},
            memory=memory,
        )

    def _slot_bank(self, slot: int) -> SlotBank:
        check_slot(slot, self.max_loras if self._bank is not None else 0)
        assert self._bank is not None
        return self._bank
