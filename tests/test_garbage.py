"""Requests leave nothing behind that only a search for garbage would find, and the search is seldom."""

import gc
from collections.abc import Iterator

import pytest

from eventually import eventually
from fast_requests import BINARY, asking, infer
from moelet.service.garbage import NEW_OBJECTS, search_seldom
from raw_http import answered, connected
from running_service import RunningService, hidden_states
from v2_wire import request

JSON = b'{"hidden_states": [[' + b",".join([b"0.5"] * 48) + b"]]}"
REQUESTS = {
    "past the application": (200, asking(3)),
    "through the application": (200, asking(3, b"Accept-Encoding: gzip")),
    "JSON": (200, b"POST /v1/layers/1/forward HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(JSON), JSON)),
    "refused shape": (400, infer(*request({"hidden_states": hidden_states(3)[:, :40]}, **BINARY))),
    "refused body": (400, asking(3, b"Content-Encoding: gzip")),
    "refused layer": (404, asking(3).replace(b"layers.1", b"layers.9")),
    "refused adapter": (404, asking(3, parameters={**BINARY["parameters"], "adapter": "none"})),
}


@pytest.fixture
def found() -> Iterator[list[object]]:
    """What a search finds that is begun in the test; none is begun else."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("kind", REQUESTS)
def test_requests_leave_no_garbage(running_service: RunningService, found: list[object], kind: str) -> None:
    status, sent = REQUESTS[kind]
    with connected(running_service) as client:
        for _ in range(30):
            assert answered(client, sent).startswith(b"HTTP/1.1 %d " % status)
        eventually(lambda: running_service.service.lifecycle.in_flight == 0)
        gc.collect()
        assert len(found) < 30


def test_what_is_there_is_left_out_and_a_search_is_seldom() -> None:
    before = gc.get_threshold()
    try:
        search_seldom()
        assert gc.get_freeze_count() > NEW_OBJECTS
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
