"""Small valid v2 requests for the tests of the codec, read as they are or after a change to their JSON."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from moelet.layer.spec import LayerSpec
from moelet.service.v2.codec import Inference, read_inference
from moelet.service.v2.layout import remembering
from v2_wire import request

SPEC = LayerSpec(index=4, hidden_size=6, intermediate_size=5, num_experts=4, top_k=2)
HIDDEN = np.arange(18).reshape(3, 6) / 4
TOPK = {"topk_ids": [[0, 3], [-1, 1], [2, 2]], "topk_weights": [[0.5, 0.1], [1, 2], [-3, 0]]}


def read(body: bytes, length: int | None) -> Inference:
    """``body`` through the codec, for ``SPEC``."""
    return read_inference(memoryview(bytearray(body)), length, SPEC, remembering(SPEC))


def edited(edit: Callable[[dict[str, Any]], Any], inputs: dict[str, Any] | None = None, tail: bytes = b"") -> Inference:
    """A valid request whose JSON ``edit`` has changed; what it returns, if anything, takes its place."""
    body, length = request(inputs or {"hidden_states": HIDDEN})
    sent = json.loads(body[:length])
    sent = edit(sent) or sent
    head = json.dumps(sent).encode()
    return read(head + body[length:] + tail, len(head))
