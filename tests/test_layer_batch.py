"""What a batch must be to be computed: every tensor's dtype, shape and range, and whether any token has an adapter."""

from dataclasses import replace

import pytest
import torch

from moelet.layer.engine import LayerBatch
from moelet.layer.errors import RequestError
from moelet.layer.spec import LayerSpec
from random_layers import random_batch

SPEC = LayerSpec(index=0, hidden_size=16, intermediate_size=8, num_experts=5, top_k=2)
SLOTS = 3


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(batch: LayerBatch) -> str | None:
    with pytest.raises(RequestError) as error:
        batch.check(SPEC, SLOTS)
    return error.value.param


@pytest.mark.parametrize(
    ("slots", "adapted"),
    [(None, False), (ids(-1, -1, -1), False), (ids(-1, -1, 0), True), (ids(2, 1, 0), True), (ids(0, -1, -1), True)],
)
def test_whether_any_token_has_an_adapter(slots: torch.Tensor | None, adapted: bool) -> None:
    batch = replace(random_batch(SPEC, 3, drop=0.3), token_slots=slots)
    assert batch.check(SPEC, SLOTS) is batch.any_adapter is adapted
    assert batch.part(0, 0).check(SPEC, SLOTS) is batch.part(0, 0).any_adapter is False


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (2, 0)])
@pytest.mark.parametrize("value", [-(2**31), -2, 5, 2**31 - 1])
def test_one_id_out_of_range_is_refused_wherever_it_is(value: int, place: tuple[int, int]) -> None:
    batch = random_batch(SPEC, 3)
    assert batch.topk_ids is not None
    for edge in (-1, 4):
        batch.topk_ids[place] = edge
        batch.check(SPEC, SLOTS)
    batch.topk_ids[place] = value
    assert refused(batch) == "topk_ids"
    strided = torch.stack([batch.topk_ids, torch.zeros_like(batch.topk_ids)], dim=2)[..., 0]
    assert refused(replace(batch, topk_ids=strided)) == "topk_ids"
    assert refused(replace(random_batch(SPEC, 3), token_slots=ids(0, value, 1))) == "token_slots"


def test_slots_end_at_those_that_there_are() -> None:
    batch = random_batch(SPEC, 3)
    assert replace(batch, token_slots=ids(0, 2, -1)).check(SPEC, SLOTS)
    assert refused(replace(batch, token_slots=ids(0, 3, -1))) == "token_slots"


WRONG = {
    "hidden_states": [torch.zeros(3, 15).bfloat16(), torch.zeros(3, 16), torch.zeros(3, 16, 1).bfloat16()],
    "topk_ids": [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32), ids(0, 0, 0)],
    "topk_weights": [torch.zeros(3, 2).bfloat16(), torch.zeros(3, 1)],
    "router_logits": [torch.zeros(3, 4), torch.zeros(3, 5).double()],
    "token_slots": [torch.zeros(3), ids(0, 0), torch.zeros(3, 1, dtype=torch.int32)],
}


@pytest.mark.parametrize("name", WRONG)
def test_other_types_and_shapes_are_refused_by_name(name: str) -> None:
    batch = random_batch(SPEC, 3)
    if name == "router_logits":
        batch = replace(batch, topk_ids=None, topk_weights=None)
    for tensor in WRONG[name]:
        assert refused(replace(batch, **{name: tensor})) == name


def test_what_routes_comes_whole_and_once() -> None:
    batch = random_batch(SPEC, 3)
    assert refused(replace(batch, topk_ids=None)) == "topk_ids"
    assert refused(replace(batch, topk_weights=None)) == "topk_weights"
    assert refused(replace(batch, router_logits=torch.zeros(3, 5))) == "router_logits"
