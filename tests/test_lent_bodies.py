"""Large bodies and batches in memory that the engine lends: in place, none twice at a time, none lost."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eventually import eventually
from fake_driver import FakeDriver

pytest.importorskip("cuda.bindings.driver")

from fake_engine import ELSEWHERE, SPEC, Opened, opened
from fast_requests import BINARY, Pair, asking, infer, left_and_late, paired
from moelet.graphs import staging
from moelet.graphs.locked_blocks import LockedBlocks
from moelet.layer.engine import Forward, LayerBatch
from moelet.service import batch as batch_module
from moelet.service.batch import Batch
from moelet.service.v2 import bodies
from moelet.service.v2.codec import read_inference
from moelet.service.v2.layout import remembering
from moelet.service.work import Part
from random_layers import random_batch
from raw_http import LAST, answered, connected, until_closed
from running_service import EXPERTS, OpenEngine, RunningService, hidden_states
from v2_wire import json_request, request

BLOCK = 8192


class Lender:
    """Lends blocks for a service's engine; ``seen`` are the places of hidden states that it was given, by block."""

    def __init__(self, service: RunningService, count: int) -> None:
        self.blocks = LockedBlocks(count, BLOCK)
        self.asked: list[int] = []
        self.seen: list[int | None] = []
        self._starts = [block.host for block in self.blocks._blocks]
        self._begin = service.engine.engine.begin

    def input_memory(self, num_bytes: int) -> memoryview | None:
        self.asked.append(num_bytes)
        block = self.blocks.take(num_bytes)
        return None if block is None else self.blocks.octets(block, num_bytes)

    def begin(self, batch: LayerBatch) -> Forward:
        address = batch.hidden_states.data_ptr()
        own = [place for place, start in enumerate(self._starts) if start <= address < start + BLOCK]
        assert not own or address % 16 == 0
        self.seen.append(own[0] if own else None)
        return self._begin(batch)

    def is_whole(self) -> bool:
        """Whether every block is free."""
        gc.collect()
        return len(self.blocks._free) == len(self._starts)


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, adapter_root: Path) -> Iterator[Pair]:
    with paired(open_engine, adapter_root) as made:
        yield made


@pytest.fixture
def lender(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lender]:
    """Two blocks for the service with the way past the application, any body being large."""
    FakeDriver().install(monkeypatch)
    lender = Lender(pair.fast, 2)
    monkeypatch.setattr(bodies, "LARGEST_KEPT", 0)
    monkeypatch.setattr(pair.fast.engine, "input_memory", lender.input_memory, raising=False)
    monkeypatch.setattr(pair.fast.engine.engine, "begin", lender.begin)
    yield lender
    eventually(lender.is_whole)


def test_hidden_states_are_computed_where_they_came(pair: Pair, lender: Lender) -> None:
    """However long the JSON in front of them is, whatever comes with them, and with an adapter too."""
    topk = {"topk_ids": torch.randint(-1, EXPERTS, (5, 2)), "topk_weights": torch.rand(5, 2)}
    sent = [asking(5, b"X-B: 1", seed=number, id="i" * number) for number in range(20)]
    sent.append(infer(*request({"hidden_states": hidden_states(5), **topk}, **BINARY)))
    sent.append(asking(5, b"X-B: 1", parameters={**BINARY["parameters"], "adapter": "b"}))
    assert pair.in_turn(*sent) == [200] * len(sent)
    assert len(lender.seen) == len(sent)
    assert None not in lender.seen


def test_json_and_other_datatypes_are_converted_as_ever(pair: Pair, lender: Lender) -> None:
    halves = infer(*request({"hidden_states": hidden_states(2)}, {"hidden_states": "FP16"}, **BINARY))
    text = json_request({"hidden_states": hidden_states(2)}, **BINARY)
    assert pair.in_turn(halves, infer(text, None)) == [200, 200]
    assert lender.seen == [None, None]
    assert len(lender.asked) == 1, "a body of JSON takes no block"


def test_small_bodies_take_no_block(pair: Pair, lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGEST_KEPT", 32768)
    assert pair.in_turn(asking(5, b"X-B: 2")) == [200]
    assert not lender.asked


def test_where_no_block_is_left_others_are_answered_too(pair: Pair, lender: Lender) -> None:
    """Slow clients have all of them; a body that fits into none takes none either."""
    sent = [asking(5, b"X-B: 3", seed=seed) for seed in range(4)]
    large = asking(100, b"X-B: 3")

    def act(service: RunningService) -> bytes:
        with ExitStack() as open_:
            slow = [open_.enter_context(connected(service)) for _ in range(2)]
            for client, each in zip(slow, sent, strict=False):
                client.sendall(each[:-40])
            with connected(service) as quick:
                said = answered(quick, sent[2]) + answered(quick, large)
            for client, each in zip(slow, sent, strict=False):
                said += answered(client, each[-40:])
            with connected(service) as last:
                last.sendall(sent[3] + LAST)
                return said + until_closed(last)

    assert [status for status, *_ in pair.of_both(act)] == [200] * 6
    assert lender.seen[:2] == [None, None]
    assert None not in lender.seen[2:]


def test_a_block_that_is_computed_with_is_not_written_to(pair: Pair, lender: Lender) -> None:
    """One client leaves and one is answered too late while the engine has their tensors."""

    def act(service: RunningService) -> bytes:
        return left_and_late(service, 5, 3)

    assert [status for status, *_ in pair.of_both(act)] == [504, 200, *[200, 200] * 3]
    assert len(lender.asked) == 5


@pytest.mark.parametrize("lent", [True, False], ids=["lent", "none left"])
@pytest.mark.parametrize("least", [1, 1 << 20], ids=["many", "few"])
def test_hidden_states_of_several_are_laid_behind_each_other_in_a_block(
    lender: Lender, lent: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "LENT_BYTES", least)
    taken = [] if lent else [lender.input_memory(1) for _ in range(2)]
    batches = [random_batch(SPEC, tokens, seed=tokens) for tokens in (1, 4, 2)]
    parts = [Part(Mock(), batch, (), None, None) for batch in batches]
    assembled = Batch(parts, Mock()).assemble(lender.input_memory)
    assert assembled.hidden_states.equal(torch.cat([batch.hidden_states for batch in batches]))
    assert assembled.topk_ids.equal(torch.cat([batch.topk_ids for batch in batches]))
    in_block = lent and least == 1
    assert len(lender.blocks._free) == (1 if in_block else 2 - len(taken))
    alone = Batch(parts[1:2], Mock()).assemble(lender.input_memory)
    assert alone is batches[1]
    adapted = Batch([Part(Mock(), batches[1], (Mock(slot=3),), None, None)], Mock()).assemble(lender.input_memory)
    assert adapted.hidden_states is batches[1].hidden_states, "one request's stay where they came"
    assert adapted.token_slots.tolist() == [3] * 4


@pytest.mark.parametrize("name", ["i", "in", "inf", "infe"])
def test_a_body_that_the_gpu_engine_lent_is_fetched_from_where_it_came(
    opened: Opened, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LARGEST_KEPT", 0)
    monkeypatch.setattr(staging, "ASKED_BYTES", 1)
    batch = random_batch(SPEC, 4)
    sent, json_bytes = request({"hidden_states": batch.hidden_states.float()}, id=name, **BINARY)
    body = bodies.Bodies(len(sent), json_bytes, opened.engine.input_memory).take()
    body.octets[:] = sent
    call = read_inference(body.octets, json_bytes, SPEC, remembering(SPEC)).call
    opened.engine.begin(call.batch).result()
    [fetched] = opened.driver.fetches
    assert fetched.rest == ELSEWHERE + np.frombuffer(body.octets[json_bytes:], np.uint8).ctypes.data
    assert opened.came(call.batch)
    assert call.batch.hidden_states.equal(batch.hidden_states)


def test_memory_is_right_for_any_values_of_it(lender: Lender) -> None:
    made = bodies.Bodies(100, 7, lender.input_memory)
    taken = [made.take() for _ in range(3)]
    for body in taken:
        assert len(body.octets) == 100
        assert np.frombuffer(body.octets[7:], np.uint8).ctypes.data % 16 == 0
        body.octets[:] = bytes(100)
    assert not lender.blocks._free, "the third has memory of its own"
