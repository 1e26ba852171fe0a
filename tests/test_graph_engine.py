"""The GPU engine over the fake driver: what a forward asks of the driver, what it refuses first, and what it runs."""

# ruff: noqa: F401, F811 (fixtures are imported, and asked for by name)

import ctypes
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.driver")

from fake_engine import ELSEWHERE, OPTIONS, SPEC, Opened, opened
from moelet.graphs import staging
from moelet.graphs.options import GraphOptions
from moelet.graphs.planning import plan_memory
from moelet.layer.errors import LayerNotServedError, RequestError
from random_layers import model_of, random_batch

ALONE = [
    "cuCtxSetCurrent",
    "cuLaunchKernelEx",
    "cuGraphLaunch",
    "cuEventRecord",
    "cuCtxSetCurrent",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("slots", [None, [-1] * 4, [0, -1, 1, 0]], ids=["none", "none of any", "some"])
def test_a_forward_alone_is_a_fetch_a_graph_and_an_event(opened: Opened, slots: list[int] | None) -> None:
    sent = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    assert opened.calls(token_slots=sent) == ALONE
    assert opened.calls(topk_ids=None, topk_weights=None, token_slots=sent) == ALONE
    [first, second] = opened.driver.heads
    assert first["num_tokens"] == second["num_tokens"] == 4
    assert first["output"] != 0 != second["output"]
    assert first["gate_up"] != 0 != first["lora"]


def test_only_a_batch_with_adapters_runs_with_them(opened: Opened) -> None:
    for slots in (None, [-1] * 4, [-1, -1, -1, 1]):
        opened.calls(token_slots=None if slots is None else torch.tensor(slots, dtype=torch.int32))
    base, none, some = opened.driver.launched
    assert base == none < some


@pytest.mark.parametrize("fetched", [True, False], ids=["fetched", "copied"])
def test_a_large_input_is_copied(opened: Opened, fetched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = 256 * 4 + 4 * 256  # head, slots, ids and weights take 256 bytes each
    monkeypatch.setattr(staging, "FETCHED_BYTES", num_bytes if fetched else num_bytes - 1)
    assert opened.calls()[1] == ("cuLaunchKernelEx" if fetched else "cuMemcpyHtoDAsync")
    [head] = opened.driver.heads
    assert head["num_tokens"] == 4
    hidden = random_batch(SPEC, 4).hidden_states
    assert ctypes.string_at(opened.driver.input + 1024, hidden.nbytes) == hidden.view(torch.int16).numpy().tobytes()


def test_a_forward_beside_another_is_brought_by_the_detour(opened: Opened) -> None:
    ahead = opened.engine.begin(random_batch(SPEC, 3))
    assert "cuLaunchKernelEx" not in opened.calls()
    assert [int(head["num_tokens"]) for head in opened.driver.heads][:1] == [3]
    ahead.result()
    assert opened.calls()[1] == "cuLaunchKernelEx"
    assert opened.driver.heads[-1]["num_tokens"] == 4


def test_outputs_that_are_held_are_written_apart(opened: Opened) -> None:
    batch = random_batch(SPEC, 3)
    held = [opened.engine.forward(batch) for _ in range(20)]
    outputs = [int(head["output"]) for head in opened.driver.heads]
    assert outputs[16:] == [0] * 4, "they are copied"
    assert [output.data_ptr() + ELSEWHERE for output in held[:16]] == outputs[:16]
    assert len(set(outputs[:16])) == 16


def test_what_stays_unfinalized_takes_no_place_for_an_output(opened: Opened) -> None:
    opened.engine.forward_unfinalized(random_batch(SPEC, 3))
    assert opened.driver.heads[-1]["output"] == 0


def test_more_tokens_than_run_at_once_run_in_parts(opened: Opened) -> None:
    """Each part by what its own tokens need: the first is not captured, and of the second not all have an adapter."""
    batch = random_batch(SPEC, 20)
    for adapted in (19, 0):
        slots = torch.full((20,), -1, dtype=torch.int32)
        slots[adapted] = 1
        assert opened.engine.forward(replace(batch, token_slots=slots)).shape == (20, 128)
    assert [int(head["num_tokens"]) for head in opened.driver.heads] == [4, 4]
    some, base = opened.driver.launched
    assert some > base
    with pytest.raises(RequestError, match="token_slots"):
        opened.engine.forward(replace(batch, token_slots=torch.full((20,), 2, dtype=torch.int32)))


WRONG = {
    "hidden_states": torch.zeros(4, 127, dtype=torch.bfloat16),
    "topk_ids": torch.full((4, 2), 4, dtype=torch.int32),
    "topk_weights": torch.zeros(4, 2, dtype=torch.float64),
    "router_logits": torch.zeros(4, 4),
    "token_slots": torch.tensor([0, 1, -2, 0], dtype=torch.int32),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_sent_of_what_is_refused(opened: Opened, name: str) -> None:
    opened.driver.calls.clear()
    with pytest.raises(RequestError) as refused:
        opened.calls(**{name: WRONG[name]})
    assert refused.value.param == name
    assert set(opened.driver.calls) <= {"cuCtxSetCurrent"}
    assert opened.calls() == ALONE, "and the next is served"


def test_layers_that_are_not_served_and_no_tokens(opened: Opened) -> None:
    batch = random_batch(SPEC, 4)
    with pytest.raises(LayerNotServedError):
        opened.engine.begin(replace(batch, layer=7))
    opened.driver.calls.clear()
    assert opened.engine.forward(batch.part(0, 0)).shape == (0, 128)
    assert opened.driver.calls == ["cuCtxSetCurrent"]


def test_memory_is_what_was_planned(opened: Opened) -> None:
    plan = plan_memory(model_of(SPEC), GraphOptions(**OPTIONS))
    taken = dict(opened.engine.memory_bytes)
    assert taken.pop("graphs") >= 0
    assert 0 <= taken.pop("arena") - plan.arena_bytes < 1024, "as much as it takes to begin at a multiple of 1024"
    assert taken == {"weights": plan.weight_bytes, "adapter_slots": plan.all_slots_bytes}
