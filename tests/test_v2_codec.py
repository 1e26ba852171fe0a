"""The v2 codec on bodies written by hand: tensors where they lie, names, parameters, and answers as asked for."""

import json
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

from moelet.layer.errors import RequestError
from moelet.service.call import Answer
from moelet.service.rows import COPIED, Rows, octets_of
from moelet.service.v2.codec import read_inference, write_answer
from moelet.service.v2.layout import LONGEST_REMEMBERED, remembering
from moelet.service.work import Part, Work
from v2_requests import HIDDEN, SPEC, TOPK, edited, read
from v2_wire import json_request, request


@pytest.mark.parametrize("lead", range(8))
def test_every_tensor_arrives_whatever_its_place(lead: int) -> None:
    """``lead`` shifts the bytes, so that no alignment is taken for granted."""
    sent = {"hidden_states": HIDDEN, **TOPK, "adapter": ["a", "", "b"]}
    got = read(*request(sent, {"topk_ids": "INT64"}, id="x" * lead)).call
    assert torch.equal(got.batch.hidden_states, torch.from_numpy(HIDDEN).bfloat16())
    assert got.batch.topk_ids is not None
    assert (got.batch.topk_ids.dtype, got.batch.topk_ids.tolist()) == (torch.int32, TOPK["topk_ids"])
    assert torch.equal(got.batch.topk_weights, torch.tensor(TOPK["topk_weights"]))
    assert got.names == ("a", "b")
    assert got.token_names is not None
    assert got.token_names.tolist() == [0, -1, 1]
    tensors = (got.batch.hidden_states, got.batch.topk_weights, got.batch.topk_ids)
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in tensors)


def test_what_waits_counts_all_its_tensors_and_keeps_no_json() -> None:
    for sent in ({"hidden_states": HIDDEN, **TOPK}, {"hidden_states": HIDDEN, "router_logits": np.zeros((3, 4))}):
        for got in (read(*request(sent)), read(json_request(sent), None)):
            batch = got.call.batch
            tensors = (batch.hidden_states, batch.topk_ids, batch.topk_weights, batch.router_logits)
            kept = [tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None]
            assert len(kept) == len(sent)
            assert Part(cast(Work, None), batch, (), None, None).num_bytes == sum(kept)
            assert got.request.inputs == ()


def test_tensors_are_views_of_an_aligned_body() -> None:
    body, length = request({"hidden_states": HIDDEN})
    lead = -length % 2
    held = bytearray(lead) + bytearray(body)
    got = read_inference(memoryview(held)[lead:], length, SPEC, remembering(SPEC)).call.batch.hidden_states
    held[-2:] = np.array(7, ml_dtypes.bfloat16).tobytes()
    assert got[2, 5].item() == 7


@pytest.mark.parametrize("padding", [0, LONGEST_REMEMBERED])
def test_what_is_remembered_of_a_request_is_not_its_values(padding: int) -> None:
    reader = remembering(SPEC)
    for seed in (1, 2):
        hidden = np.random.default_rng(seed).integers(-8, 8, (3, 6))
        body, length = request({"hidden_states": hidden, "adapter": [f"a{seed}"] * 3}, id="x" * padding)
        got = read_inference(memoryview(bytearray(body)), length, SPEC, reader)
        assert got.call.batch.hidden_states.tolist() == hidden.tolist()
        assert got.call.names == (f"a{seed}",)
    with pytest.raises(RequestError, match="binary_data_size"):
        read_inference(memoryview(bytearray(body[:-1])), length, SPEC, reader)


@pytest.mark.parametrize("nested", [True, False])
def test_json_data_may_be_nested_or_flat_and_mixed_with_bytes(nested: bool) -> None:
    def edit(sent: dict[str, Any]) -> None:
        ids = np.array(TOPK["topk_ids"])
        data = ids.tolist() if nested else ids.flatten().tolist()
        sent["inputs"][1:1] = [{"name": "topk_ids", "datatype": "INT32", "shape": [3, 2], "data": data}]

    got = edited(edit, {"hidden_states": HIDDEN, "topk_weights": TOPK["topk_weights"]}).call.batch
    assert got.topk_ids is not None
    assert got.topk_ids.tolist() == TOPK["topk_ids"]
    assert torch.equal(got.topk_weights, torch.tensor(TOPK["topk_weights"]))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "a", "a"], (("a",), [0, 0, 0])),
        (["a"], (("a",), [0, 0, 0])),
        (["", "", ""], ((), None)),
        ([""], ((), None)),
        (["", "é", ""], (("é",), [-1, 0, -1])),
        (["\0\0\0\0", "\0", "a"], (("\0\0\0\0", "\0", "a"), [0, 1, 2])),
    ],
)
def test_adapters(names: list[str], expected: tuple[tuple[str, ...], list[int] | None]) -> None:
    for body, length in (
        request({"hidden_states": HIDDEN, "adapter": names}),
        (json_request({"hidden_states": HIDDEN, "adapter": names}), None),
    ):
        got = read(body, length).call
        assert got.names == expected[0]
        tokens = None if got.token_names is None else got.token_names.tolist()
        assert tokens == expected[1] or (tokens is None and len(set(expected[1] or [])) == 1)


def test_parameters() -> None:
    def edit(sent: dict[str, Any]) -> None:
        sent["model_name"] = "layers.4"
        sent["parameters"] = {"adapter": "a", "timeout": 2**40, "priority": 3, "triton_x": 1, "output_datatype": "FP16"}

    got = edited(edit)
    assert (got.call.names, got.request.timeout, got.request.datatype) == (("a",), 2**40, "FP16")
    assert edited(lambda sent: sent.update(parameters={"adapter": "", "timeout": 0})).request.timeout is None
    assert edited(lambda sent: sent.update(parameters=None, outputs=None, id=None)).call.names == ()


def test_of_two_fields_of_one_name_the_last_counts() -> None:
    body = b'{"inputs": 3, ' + json_request({"hidden_states": HIDDEN})[1:]
    assert read(body, None).call.batch.num_tokens == 3


@pytest.mark.parametrize("binary", [True, False])
def test_answers_are_written_as_asked(binary: bool) -> None:
    asked = edited(lambda sent: sent.update(id="é", parameters={"binary_data_output": binary})).request
    hidden = torch.tensor([[1.5, float("nan")], [float("inf"), -2]]).bfloat16()
    pieces, length = write_answer(Answer(4, Rows.of(hidden), {"b": 2, "a": 1}), asked, "layers.4")
    head = json.loads(pieces[0])
    assert (head["id"], json.loads(head["parameters"]["adapter_versions"])) == ("é", {"b": 2, "a": 1})
    if binary:
        assert length == len(pieces[0])
        assert bytes(pieces[1]) == hidden.view(torch.uint8).numpy().tobytes()
        assert head["outputs"][0]["parameters"] == {"binary_data_size": 8}
    else:
        assert (length, len(pieces)) == (None, 1)
        assert head["outputs"][0]["data"] == [1.5, None, None, -2]


@pytest.mark.parametrize("columns", [3, COPIED // 4, COPIED // 4 + 1])
def test_the_bytes_of_a_tensor_are_its_rows_and_only_few_are_copied(columns: int) -> None:
    tensor = torch.zeros(2, columns, dtype=torch.bfloat16)
    view = octets_of(tensor)
    tensor[1] += 1
    rows = np.array([[0], [1]]).repeat(columns, 1).astype(ml_dtypes.bfloat16)
    assert bytes(octets_of(tensor)) == rows.tobytes()
    assert bytes(octets_of(tensor.t())) == rows.T.tobytes()
    assert bytes(view) == (rows.tobytes() if tensor.nbytes > COPIED else bytes(len(view)))
    assert len(octets_of(tensor[:0])) == len(octets_of(torch.empty(4, 0, dtype=torch.bfloat16).t())) == 0
