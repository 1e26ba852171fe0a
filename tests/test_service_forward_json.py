"""The JSON form of a forward: exact numbers in and out, and nothing but a ``RequestError`` for anything else."""

import json
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelet.layer.errors import RequestError
from moelet.layer.spec import LayerSpec
from moelet.service.call import Answer
from moelet.service.forward_json import FIELDS, parse_forward, render_forward
from moelet.service.rows import Rows

SPEC = LayerSpec(index=4, hidden_size=3, intermediate_size=5, num_experts=4, top_k=2)


def parse(**fields: Any) -> Any:
    return parse_forward(json.dumps(fields).encode(), SPEC)


@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_numbers_are_rounded_once_to_bf16(rows: list[list[float]]) -> None:
    got = parse(hidden_states=rows).batch.hidden_states
    expected = torch.from_numpy(np.array(rows, np.float32)).bfloat16()
    assert torch.equal(got.view(torch.int16)[~got.isnan()], expected.view(torch.int16)[~expected.isnan()])
    assert torch.equal(got.isnan(), expected.isnan())


def test_every_field_arrives_in_its_dtype() -> None:
    batch = parse(hidden_states=[[1, 2, 3]], topk_ids=[[3, -1]], topk_weights=[[1, 0.1]]).batch
    assert (batch.layer, batch.num_tokens) == (4, 1)
    assert batch.topk_ids.tolist() == [[3, -1]]
    assert batch.topk_ids.dtype == torch.int32
    assert torch.equal(batch.topk_weights, torch.tensor([[1, 0.1]]))
    logits = parse(
        hidden_states=[[1, 2, 3]], router_logits=[[1e-3, 2, float("nan"), float("-inf")]]
    ).batch.router_logits
    assert torch.equal(logits.nan_to_num(7), torch.tensor([[1e-3, 2, 7, float("-inf")]]).nan_to_num(7))


def test_adapters_are_named_once_each() -> None:
    call = parse(hidden_states=[[0, 0, 0]] * 4, adapters=["b", None, "a", "b"])
    assert call.names == ("b", "a")
    assert call.token_names.tolist() == [0, -1, 1, 0]
    assert parse(hidden_states=[[0, 0, 0]], adapters=[None]).token_names is None
    one = parse(hidden_states=[[0, 0, 0]] * 2, adapter="a")
    assert (one.names, one.token_names) == (("a",), None)


def test_answers_are_exact_and_what_is_not_finite_is_null() -> None:
    values = torch.randn(4, 3).bfloat16()
    values[1] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    answer = json.loads(render_forward(Answer(4, Rows.of(values), {"a": 2})))
    assert answer["hidden_states"][1] == [None] * 3
    rest = [0, 2, 3]
    assert torch.equal(torch.tensor([answer["hidden_states"][i] for i in rest]), values[rest].float())
    assert (answer["layer"], answer["num_tokens"], answer["adapter_versions"]) == (4, 4, {"a": 2})


def test_a_long_string_among_numbers_costs_no_more_than_itself() -> None:
    """numpy makes strings of all the numbers beside one, each as wide as the longest."""
    body = json.dumps({"hidden_states": [["x" * 1_000_000, 0, 0]] + [[0, 0, 0]] * 1000}).encode()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="a string among them"):
            parse_forward(body, SPEC)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("ids", "words"),
    [([[0, 2**63]], "whole numbers in -1..3"), ([[-1, 2**70]], "huge"), ([[0, 2**40]], f"got {2**40}")],
)
def test_ids_of_any_size_are_refused(ids: list[list[int]], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_forward(json.dumps({"hidden_states": [[0, float("nan"), 0]], "topk_ids": ids}).encode(), SPEC)


def test_ids_are_whole_numbers_however_json_writes_them() -> None:
    def ids(sent: list[float]) -> torch.Tensor | None:
        body = {"hidden_states": [[0, 0, 0]], "topk_ids": [sent], "topk_weights": [[1, 1]]}
        return parse_forward(json.dumps(body).encode(), SPEC).batch.topk_ids

    whole = ids([-1, 3])
    for sent in ([-1.0, 3.0], [-1, 3.0]):
        assert whole is not None
        assert torch.equal(whole, ids(sent))
    for wrong in (0.5, -2.0, 4.0, 1e30, float("nan"), float("inf")):
        with pytest.raises(RequestError, match=rf"whole numbers in -1\.\.3, got {re.escape(f'{wrong:g}')} among them"):
            ids([0, wrong])


def test_a_number_without_end_is_refused_in_our_own_words() -> None:
    for fill in (b"0", b"NaN"):  # beside NaN it is Python that reads the body
        with pytest.raises(RequestError) as refused:
            parse_forward(b'{"hidden_states": [[%s, 0, 1%s]]}' % (fill, b"0" * 5000), SPEC)
        assert "set_int_max_str_digits" not in str(refused.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES) | VALUES)
def test_anything_else_is_the_request_s_fault(body: Any) -> None:
    try:
        call = parse_forward(json.dumps(body).encode(), SPEC)
        call.batch.check(SPEC, max_loras=0)
        fault = None
    except RequestError as error:
        fault = error.param
    together = ("topk_ids", "topk_weights")
    assert fault in (None, "hidden_states") or fault in body or (fault in together and any(f in body for f in together))


@given(st.binary(max_size=40) | st.text(alphabet='[]{}":,NaN0', max_size=40).map(str.encode))
def test_any_bytes_are_the_request_s_fault(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_forward(body, SPEC)
