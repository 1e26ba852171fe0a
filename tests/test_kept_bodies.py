"""Bodies whose memory is used again: what was read of the last one stands for the next only where it is the same."""

import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

from fast_requests import BINARY, Pair, asking, infer, left_and_late, paired
from moelet.service.v2.bodies import KEPT_BYTES, LARGEST_KEPT, LONGEST_READ, READING_BYTES, Bodies
from moelet.service.v2.direct import DirectInference
from moelet.service.v2.layout import read_layout
from raw_http import answered, connected
from running_service import HIDDEN, OpenEngine, RunningService, hidden_states, small_model
from v2_wire import request


@pytest.fixture(scope="module")
def pair(open_engine: OpenEngine, adapter_root: Path) -> Iterator[Pair]:
    """Both services over two adapters."""
    with paired(open_engine, adapter_root) as made:
        yield made


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request whether its body was known before it was read."""
    found: list[bool] = []
    read = DirectInference._read

    def noted(self: DirectInference, body: object) -> object:
        before = body.read  # type: ignore[attr-defined]
        inference = read(self, body)  # type: ignore[arg-type]
        found.append(before is not None and inference is before[1])
        return inference

    monkeypatch.setattr(DirectInference, "_read", noted)
    return found


def test_the_next_values_are_read_where_the_last_ones_lay(pair: Pair, reads: list[bool]) -> None:
    assert pair.in_turn(*(asking(2, b"X-A: 1", seed=seed) for seed in range(5))) == [200] * 5
    assert reads == [False, True, True, True, True]


def test_other_json_of_the_same_length_is_read(pair: Pair, reads: list[bool]) -> None:
    sent = [asking(2, b"X-A: 2", seed=seed, id=name) for seed, name in enumerate("aabba")]
    assert pair.in_turn(*sent) == [200] * 5
    assert reads == [False, True, False, True, False]
    adapters = [
        asking(2, b"X-A: 3", parameters={**BINARY["parameters"], "adapter": name}) for name in ("a", "b", "c", "a")
    ]
    assert pair.in_turn(*adapters) == [200, 200, 404, 200]


def test_what_is_more_than_one_tensor_is_read_each_time(pair: Pair, reads: list[bool]) -> None:
    names = [infer(*request({"hidden_states": hidden_states(2), "adapter": [name] * 2}, **BINARY)) for name in "aba"]
    halves = [
        infer(*request({"hidden_states": hidden_states(2, seed)}, {"hidden_states": "FP16"}, **BINARY))
        for seed in range(3)
    ]
    text = json.dumps(
        {"inputs": [{"name": "hidden_states", "datatype": "FP32", "shape": [1, HIDDEN], "data": [0.5] * HIDDEN}]}
    ).encode()
    assert pair.in_turn(*names, *halves, infer(text, None), infer(text, None)) == [200] * 8
    assert not any(reads)


def test_values_that_are_still_computed_with_are_not_written_over(pair: Pair) -> None:
    """One client leaves and one is answered too late while the engine has their tensors."""

    def act(service: RunningService) -> bytes:
        with connected(service) as first:
            answered(first, asking(2, b"X-A: 4"))  # leaves a body behind
        return left_and_late(service, 2, 4)

    assert [status for status, *_ in pair.of_both(act)] == [504, 200, *[200, 200] * 4]


def test_random_requests_of_many_clients(pair: Pair) -> None:
    drawn = random.Random(7)
    sent = [asking(drawn.randint(1, 3), seed=number, id=drawn.choice("ab")) for number in range(120)]

    def act(service: RunningService) -> bytes:
        with ExitStack() as open_:
            clients = [open_.enter_context(connected(service)) for _ in range(8)]
            said = [b""] * len(sent)
            for start in range(0, len(sent), len(clients)):
                numbers = range(start, start + len(clients))
                for number, client in zip(numbers, clients, strict=True):
                    client.sendall(sent[number])
                for number, client in zip(numbers, clients, strict=True):
                    said[number] = answered(client, b"")
            return b"".join(said)

    assert len(pair.of_both(act)) == len(sent)


def test_of_long_json_nothing_is_kept(pair: Pair, reads: list[bool]) -> None:
    assert pair.in_turn(*[asking(1, b"X-A: 6", id="i" * LONGEST_READ)] * 3) == [200] * 3
    assert reads == [False] * 3


def test_what_is_kept_with_what_was_read_is_no_more_than_that() -> None:
    """For small bodies most of it is not theirs; the JSON is as long, and its text takes as much, as may be. What
    torch allocates for a tensor is not counted here."""
    model, _ = small_model()
    text = {"id": "i" * 310 + "\U0001f600", "parameters": BINARY["parameters"]}
    sent, json_bytes = request({"hidden_states": hidden_states(1)}, **text)
    assert LONGEST_READ - 50 < json_bytes <= LONGEST_READ
    known = object.__new__(DirectInference)
    known._json_bytes, known._spec = json_bytes, model.layers[1]
    known._read_layout = partial(read_layout, spec=known._spec)
    known.bodies = Bodies(len(sent), json_bytes)

    def fill() -> None:
        taken = [known.new_body() for _ in range(KEPT_BYTES // len(sent))]
        for body in taken:
            body.octets[:] = sent
            known._read(body)
            known.bodies.give_back(body)

    fill()
    spare = known.bodies._spare
    assert 30 < len(spare) <= KEPT_BYTES // len(sent)
    tracemalloc.start()
    try:
        spare.clear()
        fill()
        assert tracemalloc.get_traced_memory()[0] < KEPT_BYTES
    finally:
        tracemalloc.stop()


def test_no_more_is_kept_than_that() -> None:
    for length, json_bytes, kept in (
        (LARGEST_KEPT, 7, KEPT_BYTES // (LARGEST_KEPT + READING_BYTES)),
        (LARGEST_KEPT + 1, 7, 0),
        (LARGEST_KEPT, LONGEST_READ + 1, 0),
    ):
        bodies = Bodies(length, json_bytes)
        taken = [bodies.take() for _ in range(KEPT_BYTES // LARGEST_KEPT + 3)]
        for body in taken:
            assert len(body.octets) == length
            assert torch.frombuffer(body.octets[json_bytes:], dtype=torch.uint8).data_ptr() % 16 == 0
            body.read = "something"
            bodies.give_back(body)
        again = [bodies.take() for _ in taken]
        assert sum(body in taken for body in again) == kept
    unread = Bodies(8, 0)
    body = unread.take()
    unread.give_back(body)
    assert unread.take() is not body
