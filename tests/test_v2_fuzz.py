"""The v2 codec on requests that were valid and are not any more: a call or a ``RequestError``, and nothing else."""

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelet.layer.errors import RequestError
from moelet.layer.spec import LayerSpec
from moelet.service.call import Answer
from moelet.service.compression import expand
from moelet.service.errors import BodyTooLargeError
from moelet.service.rows import Rows
from moelet.service.v2.codec import read_inference, write_answer
from moelet.service.v2.header import PARAMETERS, read_header_length
from moelet.service.v2.layout import DATATYPES, remembering
from mutations import changed_bytes, changed_json, little_memory
from v2_wire import json_request, request

SPEC = LayerSpec(index=4, hidden_size=3, intermediate_size=5, num_experts=4, top_k=2)
READER = remembering(SPEC)
HIDDEN = [[1.0, 2.0, 3.0], [0.5, -1.0, 0.25]]
INPUTS: list[dict[str, Any]] = [
    {"hidden_states": HIDDEN},
    {"hidden_states": HIDDEN, "router_logits": [[0.0] * 4] * 2, "adapter": ["a", ""]},
    {"adapter": ["a"], "hidden_states": HIDDEN, "topk_ids": [[0, 3], [-1, 2]], "topk_weights": [[0.5, 0.5]] * 2},
]
FIELDS: list[dict[str, Any]] = [
    {},
    {"id": "x", "parameters": {"binary_data_output": True, "output_datatype": "FP16", "timeout": 5}},
    {"outputs": [{"name": "hidden_states", "parameters": {"binary_data": True}}]},
]
NAMED = {"hidden_states": HIDDEN}, {"parameters": {"adapter": "a"}}
PAIRS = [*((inputs, fields) for inputs in INPUTS for fields in FIELDS), NAMED]
BINARY = [request(inputs, **fields) for inputs, fields in PAIRS]
PLAIN = [json_request(inputs, **fields) for inputs, fields in PAIRS]
TYPES = tuple({name for names in DATATYPES.values() for name in names})
WORDS = (*DATATYPES, *TYPES, *PARAMETERS, "name", "shape", "datatype", "data", "parameters", "binary_data_size", "id")


def check(body: bytes, length: int | None) -> None:
    """Read ``body``; what comes of it must fit the layer and be answerable."""
    held = memoryview(bytearray(body))
    try:
        with little_memory(len(body)):
            asked = read_inference(held, length, SPEC, READER)
    except RequestError:
        return
    batch, call = asked.call.batch, asked.call
    batch.check(SPEC, max_loras=0)
    assert batch.num_tokens * SPEC.hidden_size <= len(body)
    if call.token_names is not None:
        assert call.token_names.shape == (batch.num_tokens,)
        assert bool(((call.token_names >= -1) & (call.token_names < len(call.names))).all())
    pieces, json_length = write_answer(Answer(4, Rows.of(batch.hidden_states), {}), asked.request, "layers.4")
    head = json.loads(bytes(pieces[0]))
    assert head["outputs"][0]["shape"] == [batch.num_tokens, SPEC.hidden_size]
    assert (json_length is None) == (len(pieces) == 1)


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_what_the_fuzzers_start_from_is_valid(pair: int) -> None:
    for body, length in (BINARY[pair], (PLAIN[pair], None)):
        hidden = read_inference(memoryview(bytearray(body)), length, SPEC, READER).call.batch.hidden_states
        assert hidden.tolist() == HIDDEN


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_changed_json(data: st.DataObject) -> None:
    body, length = data.draw(st.sampled_from(BINARY))
    sent = data.draw(changed_json(json.loads(body[:length]), WORDS))
    head = json.dumps(sent).encode()
    check(head + body[length:], len(head))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_json_with_data_in_it(data: st.DataObject) -> None:
    sent = json.loads(data.draw(st.sampled_from(PLAIN)))
    check(json.dumps(data.draw(changed_json(sent, WORDS))).encode(), None)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_changed_bytes(data: st.DataObject) -> None:
    body, length = data.draw(st.sampled_from(BINARY))
    changed = data.draw(changed_bytes(body))
    check(changed, data.draw(st.just(length) | st.integers(0, len(changed) + 2) | st.none()))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=12))
def test_header_lengths(sent: bytes) -> None:
    if sent.isdigit() and len(sent) <= 10:
        assert read_header_length(sent) == int(sent)
    else:
        with pytest.raises(RequestError):
            read_header_length(sent)


COMPRESSIONS = {"gzip": gzip.compress, "deflate": zlib.compress}
STREAMS = [
    (coding, content, compress(content))
    for coding, compress in COMPRESSIONS.items()
    for content in (b"", b"ab" * 50, b" " * 4_000_000)
]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(range(len(STREAMS))))
def test_changed_streams(data: st.DataObject, stream: int) -> None:
    coding, content, packed = STREAMS[stream]
    sent = data.draw(changed_bytes(packed) | st.just(packed) | st.binary(max_size=30))
    expanded, error = None, None
    with little_memory(1000):
        try:
            expanded = expand(memoryview(sent), coding.encode(), 1000)
        except (BodyTooLargeError, RequestError) as refused:
            error = refused
    assert expanded is None or len(expanded) <= 1000
    if sent == packed:
        assert isinstance(error, BodyTooLargeError) if len(content) > 1000 else expanded == content
