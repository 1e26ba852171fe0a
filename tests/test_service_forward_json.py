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
    [([[0, 2**63]], "whole numbers in -1..3"), ([[-1, 2**70]], "got 1.18059e+21"), ([[0, 2**40]], f"got {2**40}")],
)
def test_ids_of_any_size_are_refused(ids: list[list[int]], words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
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


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("1e400", "1e400"),
        ("-1E+0400", r"-1E\+0400"),
        ("1" + "0" * 309, "1" + "0" * 39 + "…"),
        ("-1" + "0" * 5000, "-1" + "0" * 38 + "…"),
        ("1" * 310 + ".5e0", "1" * 40 + "…"),
    ],
)
def test_a_number_beyond_every_float_is_refused_in_our_own_words(number: str, shown: str) -> None:
    for fill in ("0", "NaN"):
        with pytest.raises(RequestError, match=rf"^the body has a number beyond every float64: {shown}$"):
            parse_forward(f'{{"hidden_states": [[{fill}, 0, {number}]]}}'.encode(), SPEC)


LIMITS = [sign * limit + step for limit in (2**53, 2**63, 2**64) for sign in (1, -1) for step in (-1, 0, 1)]
RARE = ["-0", "-0.0", "1.7976931348623158e308", "1.7976931348623159e308", "4.9e-324", "1e-400"]
NO_NUMBERS = ["01", "1.", ".5", "+1", "--1", "-", "1e", "0x1", "1_0", "nan", "-NaN"]
NUMBERS = st.from_regex(r"-?[0-9]{1,24}([.][0-9]{0,20})?([eE][-+]?[0-9]{1,4})?", fullmatch=True) | st.sampled_from(
    [*map(str, LIMITS), *RARE, *NO_NUMBERS, "1" * 309]
)
AROUND = [
    '{"hidden_states": [[BESIDE, 0, 0], [NUMBER, 1, 2]]}',
    '{"hidden_states": [[NUMBER, 1, 2], [BESIDE, 0, 0]]}',
    '{"hidden_states": [[BESIDE, 0, 0]], "topk_ids": [[NUMBER, 1]], "topk_weights": [[NUMBER, 1]]}',
    '{"hidden_states": [[BESIDE, 0, 0]], "router_logits": [[NUMBER, 1, 2, 3]]}',
    '{"hidden_states": [[BESIDE, 0, 0]], "adapters": [NUMBER]}',
]


@given(st.sampled_from(AROUND), NUMBERS)
def test_a_number_is_the_same_beside_a_bare_constant(around: str, number: str) -> None:
    """orjson reads no ``NaN``, so that beside one it is Python that reads the body."""

    def outcome(beside: str) -> str:
        try:
            batch = parse_forward(around.replace("BESIDE", beside).replace("NUMBER", number).encode(), SPEC).batch
        except RequestError as error:
            return f"{error.param}: {error}"
        tensors = batch.hidden_states, batch.topk_ids, batch.topk_weights, batch.router_logits
        return str([tensor if tensor is None else tensor.tolist() for tensor in tensors]).replace("nan", "0.0")

    assert outcome("NaN") == outcome("0.0")


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
