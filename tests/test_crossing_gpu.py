"""What kernels bring from host memory and write there, on a real GPU: bit for bit what copies would have brought."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from decode_cases import REAL, SMALL, batch_of, some_adapters
from gpu_engines import Gpu, GpuLayer, gpu, opened_engine, same_bits
from moelet.graphs import staging as staging_module
from moelet.graphs.arrival import Arrival
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.engine import GraphEngine
from moelet.graphs.fetching import Fetching
from moelet.graphs.kernels import fetch
from moelet.graphs.pool import Runnable
from moelet.graphs.program import Plan
from moelet.graphs.staging import Staging
from moelet.graphs.streams import Event
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from moelet.layer.spec import LayerSpec
from random_layers import random_adapter, random_batch, random_weights

pytestmark = pytest.mark.gpu

WHOLE = replace(SMALL, hidden_size=384)
"""Rows are as long as those that the kernels write: others are never written to where they are kept."""
FEW_EXPERTS = LayerSpec(index=0, hidden_size=640, intermediate_size=136, num_experts=3, top_k=2)
MOST = 300
LATE = 20_000_000
"""Cycles: about ten milliseconds."""


@pytest.mark.parametrize("tokens", [1, 7, 64, 80, 300])
def test_fetched_and_copied_are_the_same_bits(gpu: Gpu, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole input block, padding of rows included, through both blocks of pinned memory."""
    layer = layer_of(gpu, SMALL)
    main, shape = gpu.streams.main, MOST
    fetching = Fetching(gpu.kernels.get(fetch()), main, gpu.device.sm_count)
    staging = Staging(layer.geometry, MOST, depth=2, fetching=fetching)
    runnable = layer.runnable(shape)
    for number in range(3):
        batch = random_batch(SMALL, tokens, seed=number, slots=[0, -1, 1], drop=0.1)
        read = []
        for most in (0, 1 << 30):
            monkeypatch.setattr(staging_module, "FETCHED_BYTES", most)
            transfer = staging.transfer(runnable.variant, runnable.arena, tokens)
            assert bool(transfer.fetches) == (most > 0)
            layer.poison()
            staging.send(batch, layer.resident.head, transfer, main)
            main.synchronize()
            read.append(runnable.arena.read("input"))
        copied, fetched = read
        assert torch.equal(copied, fetched)
        assert not (fetched[: transfer.in_bytes] == 0xFF).all()
        assert (fetched[transfer.in_bytes :] == 0xFF).all(), "no more than that"
        staging.begin_receive(transfer, main)  # is not waited for: the next is sent from the other block
    main.synchronize()
    staging.close()


@contextmanager
def direct_staging(layer: GpuLayer) -> Iterator[Staging]:
    """A staging beside the layer's own, which copies: one whose forwards write their outputs themselves."""
    staging = Staging(layer.geometry, MOST, kept_tokens=MOST, depth=2, streams=layer.gpu.streams)
    yield staging
    layer.gpu.streams.synchronize()
    staging.close()


def begin(layer: GpuLayer, staging: Staging, runnable: Runnable, batch: LayerBatch, *, beside: bool = False) -> Arrival:
    """A forward whose last kernel writes the output, if it may."""
    main = layer.gpu.streams.main
    transfer = staging.transfer(runnable.variant, runnable.arena, batch.num_tokens)
    staging.send(batch, layer.resident.head, transfer, main, beside=beside, direct=True)
    runnable.run(main)
    return staging.begin_receive(transfer, main)


def layer_of(gpu: Gpu, spec: LayerSpec) -> GpuLayer:
    layer = gpu.layer(spec, max_tokens=MOST)
    layer.install(some_adapters(spec))
    return layer


def check_direct(layer: GpuLayer, staging: Staging, runnable: Runnable, batch: LayerBatch) -> None:
    """The same bits, while the arena's own buffer stays as it was."""
    copied = layer.forward(runnable, batch)
    for beside in (False, True):
        layer.poison()
        output = begin(layer, staging, runnable, batch, beside=beside).result()
        assert output.abs().max() > 0
        assert same_bits(output, copied), runnable.variant
        assert runnable.arena.read("output").isnan().all(), "it was written there too"


@pytest.mark.parametrize("plan", [None, *Plan], ids=lambda plan: plan or "base")
@pytest.mark.parametrize("spec", [WHOLE, REAL], ids=["small", "real"])
def test_written_and_copied_are_the_same_bits(
    gpu: Gpu, spec: LayerSpec, plan: Plan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "DIRECT_BYTES_BESIDE", 1 << 30)
    layer = layer_of(gpu, spec)
    with direct_staging(layer) as staging:
        for shape, routing, captured in product((1, 8, 64), RoutingInput, (True, False)):
            lora = plan is not None
            runnable = layer.runnable(shape, plan or Plan.FUSED, routing, lora=lora, captured=captured)
            check_direct(layer, staging, runnable, batch_of(spec, max(shape - 3, 1), routing, lora=lora))


@pytest.mark.parametrize("lora", [False, True], ids=["base", "lora"])
def test_the_kernels_of_many_tokens_write_them_too(gpu: Gpu, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "DIRECT_BYTES_BESIDE", 1 << 30)
    layer = layer_of(gpu, FEW_EXPERTS)
    with direct_staging(layer) as staging:
        runnable = layer.runnable(MOST, lora=lora)
        assert runnable.wide
        for tokens in (MOST, 257):
            check_direct(layer, staging, runnable, batch_of(FEW_EXPERTS, tokens, lora=lora))


@pytest.mark.parametrize("most_beside", [0, 1 << 30], ids=["copied beside", "written beside"])
def test_forwards_behind_each_other_keep_their_outputs(
    gpu: Gpu,  # noqa: ARG001 (skips without one)
    most_beside: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two under way at a time, more held than there is kept memory for, so that all ways out take turns."""
    monkeypatch.setattr(staging_module, "DIRECT_BYTES_BESIDE", most_beside)
    options = {"max_loras": 2, "max_lora_rank": 8, "decode_shapes": (8, 64), "max_decode_tokens": 64}
    with opened_engine(WHOLE, random_weights(WHOLE), max_eager_tokens=80, **options) as engine:
        engine.install_adapter(0, random_adapter(WHOLE, 1, rank=5))
        batches = [
            random_batch(WHOLE, tokens, seed=tokens, slots=slots, drop=0.1)
            for tokens, slots in product((3, 8, 50, 64, 70), (None, [0, -1]))
        ]
        wanted = [engine.forward(batch).clone() for batch in batches]
        check_chain(engine, batches, wanted)


def check_chain(engine: GraphEngine, batches: list[LayerBatch], wanted: list[Tensor]) -> None:
    held: list[tuple[Tensor, Tensor]] = []
    ahead, expected = engine.begin(batches[0]), wanted[0]
    for number in range(1, 200):
        behind = engine.begin(batches[number * 7 % len(batches)])
        held.append((ahead.result(), expected))
        ahead, expected = behind, wanted[number * 7 % len(batches)]
        if number % 40 == 0:
            assert all(same_bits(output, right) for output, right in held)
            held.clear()
    assert same_bits(ahead.result(), expected)


def test_memory_of_one_that_was_given_up_is_left_to_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written long after nobody waits for it any more; outputs that came meanwhile do not change."""
    layer = layer_of(gpu, WHOLE)
    late = layer.runnable(64, captured=True, delays={"main": LATE})
    prompt = layer.runnable(64, captured=True)
    first, second = (random_batch(WHOLE, 64, seed=seed, slots=[0, -1, 1], drop=0.1) for seed in (1, 2))
    wanted, others = layer.forward(prompt, first), layer.forward(prompt, second)
    assert not same_bits(wanted, others)
    with direct_staging(layer) as staging:
        with monkeypatch.context() as patched:
            patched.setattr(Event, "synchronize", given_up)
            with pytest.raises(EngineError):
                begin(layer, staging, late, first).result()
        [lost] = staging._lost
        assert not same_bits(lost, wanted), "it is not there yet"
        gc.collect()
        outputs = [begin(layer, staging, prompt, second, beside=True).result() for _ in range(staging.kept_blocks + 2)]
        assert all(same_bits(output, others) for output in outputs)
        assert same_bits(lost, wanted), "it has been written since, and by nobody else"


def given_up(_: Event) -> None:
    raise EngineError("the driver says that nothing more will come")
