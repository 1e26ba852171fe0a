"""V2 requests with something wrong: one sentence for each, naming the field, before any memory is touched."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moelet.layer.errors import RequestError
from moelet.service.v2.header import read_header_length
from v2_requests import HIDDEN, TOPK, edited, read
from v2_wire import bytes_tensor, json_request, request


def set_input(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda sent: sent["inputs"][0].update(fields)


def with_parameters(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda sent: sent.update(parameters=fields)


def with_outputs(*outputs: Any) -> Callable[[dict[str, Any]], None]:
    return lambda sent: sent.update(outputs=list(outputs))


def sized(size: Any) -> Callable[[dict[str, Any]], None]:
    return set_input(parameters={"binary_data_size": size})


OUT = {"name": "hidden_states"}
ROW = [0.0] * 6
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]

REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "no object": (lambda _: [1], ("should be a JSON object", "a list")),
    "no inputs": (lambda sent: sent.pop("inputs") and None, ("inputs", "null")),
    "inputs an object": (lambda sent: sent.update(inputs={}), ("inputs", "an object")),
    "inputs empty": (lambda sent: sent.update(inputs=[]), ("hidden_states is required",)),
    "an input a string": (lambda sent: sent.update(inputs=["x"]), ("inputs[0]", "a string")),
    "no name": (set_input(name=None), ("inputs[0].name", "null")),
    "unknown input": (set_input(name="hidden"), ("unknown input 'hidden'", "hidden_states")),
    "a long unknown input": (set_input(name="x" * 10**6), ("unknown input a string",)),
    "twice": (lambda sent: sent["inputs"].append({**sent["inputs"][0]}), ("hidden_states is there twice",)),
    "no datatype": (set_input(datatype=None), ("inputs[0].datatype", "null")),
    "unknown datatype": (set_input(datatype="FP64"), ("BF16 or FP16 or FP32", "'FP64'")),
    "a datatype that lies": (set_input(datatype="FP32"), ("72 bytes", "FP32 [3, 6]", "got 36")),
    "no shape": (set_input(shape=None), ("inputs[0].shape", "null")),
    "shape a number": (set_input(shape=3), ("inputs[0].shape", "a number")),
    "shape empty": (set_input(shape=[]), ("[T, 6]", "[]")),
    "one dimension": (set_input(shape=[18]), ("[T, 6]", "[18]")),
    "three dimensions": (set_input(shape=[1, 3, 6]), ("[T, 6]", "[1, 3, 6]")),
    "many dimensions": (set_input(shape=[1] * 10**5), ("[T, 6]", "and more")),
    "too wide": (set_input(shape=[3, 7]), ("[T, 6]", "[3, 7]")),
    "a boolean dimension": (set_input(shape=[True, 6]), ("inputs[0].shape", "True")),
    "a float dimension": (set_input(shape=[3.0, 6]), ("inputs[0].shape", "3.0")),
    "a string dimension": (set_input(shape=["3", 6]), ("inputs[0].shape", "'3'")),
    "a negative dimension": (set_input(shape=[-1, 6]), ("inputs[0].shape", "-1")),
    "two negative dimensions": (set_input(shape=[-3, -6]), ("inputs[0].shape", "-3")),
    "a huge dimension": (set_input(shape=[2**63, 6]), ("inputs[0].shape", str(2**63))),
    "a dimension beyond integers": (set_input(shape=[2**70, 6]), ("inputs[0].shape", str(float(2**70)))),
    "a dimension beyond integers beside NaN": (
        lambda sent: sent.update(x=float("nan"), inputs=[{**sent["inputs"][0], "shape": [2**70, 6]}]),
        ("inputs[0].shape", str(float(2**70))),
    ),
    "a dimension beyond all": (set_input(shape=[10**400, 6]), ("a number beyond every float64", f"{10**39}…")),
    "a dimension beyond all beside NaN": (
        lambda sent: sent.update(x=float("nan"), inputs=[{**sent["inputs"][0], "shape": [10**4000, 6]}]),
        ("a number beyond every float64", f"{10**39}…"),
    ),
    "a product that would wrap": (set_input(shape=[2**31 - 1, 6]), (str(12 * (2**31 - 1)), "got 36")),
    "a nested shape": (set_input(shape=[[3], 6]), ("inputs[0].shape", "a list")),
    "a deep shape": (set_input(shape=DEEP), ("inputs[0].shape", "a list")),
    "no values": (set_input(parameters={}), ("inputs[0]", "none of them")),
    "both values": (set_input(data=[0] * 18), ("inputs[0]", "both")),
    "size negative": (sized(-1), ("inputs[0].parameters.binary_data_size", "-1")),
    "size a float": (sized(36.0), ("binary_data_size", "36.0")),
    "size a boolean": (sized(True), ("binary_data_size", "True")),
    "size a string": (sized("36"), ("binary_data_size", "'36'")),
    "size huge": (sized(2**62), ("binary_data_size", str(2**62))),
    "size too large": (sized(37), ("36 bytes as BF16 [3, 6]", "got 37")),
    "size too small": (sized(35), ("36 bytes as BF16 [3, 6]", "got 35")),
    "parameters a list": (set_input(parameters=[]), ("inputs[0].parameters", "a list")),
    "shared memory": (
        set_input(parameters={"binary_data_size": 36, "shared_memory_region": "x"}),
        ("shared_memory_region",),
    ),
    "id a number": (lambda sent: sent.update(id=3), ("id", "a number")),
    "id no Unicode": (lambda sent: sent.update(id="\ud800", x=float("nan")), ("id", "surrogate")),
    "parameters of the request": (lambda sent: sent.update(parameters=[]), ("parameters", "a list")),
    "unknown parameter": (with_parameters(adpater="a"), ("unknown parameter 'adpater'", "adapter, timeout")),
    "adapter a number": (with_parameters(adapter=1), ("the parameter adapter", "a number")),
    "adapter no Unicode": (with_parameters(adapter="\ud800", timeout=float("nan")), ("adapter", "surrogate")),
    "timeout negative": (with_parameters(timeout=-1), ("timeout", "microseconds", "-1")),
    "timeout a float": (with_parameters(timeout=1.5), ("timeout", "1.5")),
    "timeout a boolean": (with_parameters(timeout=True), ("timeout", "True")),
    "output datatype": (with_parameters(output_datatype="INT8"), ("output_datatype", "'INT8'")),
    "output datatype a list": (with_parameters(output_datatype=["BF16"]), ("output_datatype", "a list")),
    "binary output": (with_parameters(binary_data_output=1), ("binary_data_output", "a number")),
    "outputs an object": (lambda sent: sent.update(outputs={}), ("outputs", "an object")),
    "an output a string": (with_outputs("hidden_states"), ("outputs[0]", "a string")),
    "unknown output": (with_outputs({"name": "x"}), ("unknown output 'x'",)),
    "outputs twice": (with_outputs(OUT, OUT), ("outputs", "once", "2")),
    "classification": (with_outputs({**OUT, "parameters": {"classification": 1}}), ("classification", "binary_data")),
    "binary a string": (with_outputs({**OUT, "parameters": {"binary_data": "no"}}), ("binary_data", "a string")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_sentence_says_what_is_wrong(case: str) -> None:
    edit, words = REFUSED[case]
    with pytest.raises(RequestError) as refused:
        edited(edit)
    sentence = str(refused.value)
    assert all(word in sentence for word in words), sentence
    assert len(sentence) < 400


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"topk_ids": [[0, 1]] * 3}, ("topk_weights", "together")),
        ({**TOPK, "router_logits": np.zeros((3, 4))}, ("not both",)),
        ({**TOPK, "topk_ids": [[0, 1]] * 2}, ("topk_ids", "[T, 2]", "T = 3", "[2, 2]")),
        ({**TOPK, "topk_ids": [[0, 4]] * 3}, ("topk_ids", "-1..3", "got 4")),
        ({**TOPK, "topk_ids": [[0, -2]] * 3}, ("topk_ids", "got -2")),
        ({"router_logits": np.zeros((3, 5))}, ("router_logits", "[T, 4]")),
        ({"adapter": ["a", "b"]}, ("adapter", "[3] or [1]", "[2]")),
        ({"adapter": []}, ("adapter", "[3] or [1]", "[0]")),
        ({"adapter": [b"\xff", b"", b""]}, ("adapter", "UTF-8")),
    ],
)
def test_inputs_that_do_not_go_together(inputs: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        read(*request({"hidden_states": HIDDEN, **inputs}))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("wrong", [2**32, -(2**32), 2**63 - 1, -(2**63)])
def test_expert_ids_that_would_wrap_are_refused(wrong: int) -> None:
    with pytest.raises(RequestError, match=f"got {wrong}"):
        read(*request({"hidden_states": HIDDEN, **TOPK, "topk_ids": [[0, wrong]] * 3}, {"topk_ids": "INT64"}))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ("3 strings", "got 0")),
        (b"\1\0", ("3 strings", "got 0", "2 bytes")),
        (bytes_tensor(["a", "b"]), ("3 strings", "got 2")),
        (bytes_tensor(["a", "b", "c", "d"]), ("3 strings", "5 bytes more")),
        (bytes_tensor(["a", "b", "c"])[:-1], ("element 2 is longer",)),
        (bytes_tensor(["a", "b"]) + b"\xff\xff\xff\xff", ("element 2 is longer",)),
        (b"\xff\xff\xff\xff" + b"a" * 20, ("element 0 is longer",)),
        (bytes_tensor([b"\xff"] * 3), ("UTF-8",)),
    ],
)
def test_bytes_tensors_that_lie(raw: bytes, words: tuple[str, ...]) -> None:
    def edit(sent: dict[str, Any]) -> None:
        parameters = {"binary_data_size": len(raw)}
        sent["inputs"].append({"name": "adapter", "datatype": "BYTES", "shape": [3], "parameters": parameters})

    with pytest.raises(RequestError) as refused:
        edited(edit, tail=raw)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 2**31, 2**32 - 1])
def test_the_one_name_for_all_has_the_length_that_it_says(length: int) -> None:
    raw = length.to_bytes(4, "little") + b"demo"
    described = {"name": "adapter", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}
    with pytest.raises(RequestError, match="adapter"):
        edited(lambda sent: sent["inputs"].append(described), tail=raw)


def test_bytes_that_are_missing_or_left_over() -> None:
    body, length = request({"hidden_states": HIDDEN, "router_logits": np.zeros((3, 4))})
    for whole, words in (
        (body[:-1], "router_logits has binary_data_size 48, but only 47 bytes are left"),
        (body[:length], "hidden_states has binary_data_size 36, but only 0 bytes are left"),
        (body + b"x", "have 84 bytes .* but 85 lie behind"),
    ):
        with pytest.raises(RequestError, match=words):
            read(whole, length)


def test_an_adapter_comes_by_one_way() -> None:
    for names in (["a"] * 3, [""] * 3, ["a"], ["a", "b", ""]):
        with pytest.raises(RequestError, match="not both"):
            edited(with_parameters(adapter="a"), {"hidden_states": HIDDEN, "adapter": names})


@pytest.mark.parametrize(
    "data", [[ROW], [ROW] * 3 + [[]], [[ROW]] * 3, [0] * 17, [None] * 18, [True] * 18, ["1"] * 18, 3, "x", {}]
)
def test_json_data_that_does_not_fit_its_shape(data: Any) -> None:
    sent = {"inputs": [{**OUT, "shape": [3, 6], "datatype": "FP32", "data": data}]}
    with pytest.raises(RequestError, match="hidden_states"):
        read(json.dumps(sent).encode(), None)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a", None, "b"], "null"), (["a", 1, "b"], "a number"), ("abc", "a string"), ([], "got 0"), ([["a"]], "got 1")],
)
def test_json_names_must_be_strings(names: Any, words: str) -> None:
    sent = json.loads(json_request({"hidden_states": HIDDEN, "adapter": ["a"] * 3}))
    sent["inputs"][1]["data"] = names
    with pytest.raises(RequestError, match=words):
        read(json.dumps(sent).encode(), None)


@pytest.mark.parametrize("sent", [b"-1", b"+1", b" 1", b"1.0", b"0x10", b"", b"9" * 11, "١".encode(), b"1e3"])
def test_header_lengths_that_are_none(sent: bytes) -> None:
    with pytest.raises(RequestError, match="Inference-Header-Content-Length"):
        read_header_length(sent)


def test_header_lengths_beyond_or_within_the_body() -> None:
    body, length = request({"hidden_states": HIDDEN})
    for wrong, words in ((len(body) + 1, "at most"), (10**10 - 1, "at most"), (0, "JSON"), (length - 1, "JSON")):
        with pytest.raises(RequestError, match=words):
            read(body, wrong)
    with pytest.raises(RequestError, match="JSON"):
        read(body, len(body))
    with pytest.raises(RequestError, match="JSON"):
        read(body, None)
