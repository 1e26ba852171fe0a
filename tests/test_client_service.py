"""The client against a real service: the numbers that JSON gives, adapters, errors, threads, time that runs out."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import numpy as np
import pytest
import torch

from moelet.service.client import Client, RequestError, ServiceError, ServiceTimeoutError, ServiceUnreachableError
from moelet.service.keys import Keys
from running_service import EXPERTS, LAYERS, TOP_K, OpenEngine, RunningService, hidden_states, running

TOKENS = 7


@pytest.fixture
def client(running_service: RunningService) -> Iterator[Client]:
    with Client(str(running_service.client.base_url)) as client:
        yield client
    running_service.unload_all()


def routings() -> dict[str, dict[str, torch.Tensor]]:
    seeded = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(EXPERTS, generator=seeded)[:TOP_K] for _ in range(TOKENS)])
    ids[2, 1] = -1
    weights = torch.rand(TOKENS, TOP_K, generator=seeded)
    logits = torch.randn(TOKENS, EXPERTS, generator=seeded)
    return {"gate": {}, "top-k": {"topk_ids": ids, "topk_weights": weights}, "logits": {"router_logits": logits}}


@pytest.mark.parametrize("routing", ["gate", "top-k", "logits"])
def test_the_numbers_are_those_of_json(running_service: RunningService, client: Client, routing: str) -> None:
    routed, hidden = routings()[routing], hidden_states(TOKENS)
    for name, seed in (("one", 11), ("two", 12)):
        client.load_adapter(name, running_service.write(name, seed))
    versions = {record["name"]: record["version"] for record in client.adapters()}
    mixed = ["one", None, "two", "two", None, "one", None]
    for used, adapters in (([], {}), (["two"], {"adapter": "two"}), (mixed, {"adapters": mixed})):
        wanted = running_service.output(3, hidden_states=hidden, **routed, **adapters)
        given: dict[str, Any] = {**routed, **adapters}
        answer = client.answer(3, hidden, **given)
        assert torch.equal(answer.hidden_states, wanted)
        assert answer.adapter_versions == {name: versions[name] for name in used if name}
        arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        assert np.array_equal(client.forward(3, hidden.numpy(), **arrays), wanted.numpy())
        assert torch.equal(client.forward(3, hidden.bfloat16(), **given).float(), wanted)
        assert torch.equal(client.forward(3, hidden.half(), **given), wanted.half())


def test_adapters_are_loaded_replaced_and_unloaded(running_service: RunningService, client: Client) -> None:
    hidden = hidden_states(TOKENS)
    first, second = running_service.write("first", 21), running_service.write("second", 22)
    record = client.load_adapter("served", Path(first), pinned=True)
    assert (record["name"], record["version"], record["pinned"]) == ("served", 1, True)
    before = client.answer(1, hidden, adapter="served")
    with pytest.raises(ServiceError, match="loaded already") as caught:
        client.load_adapter("served", second)
    assert caught.value.status == 400
    record = client.load_adapter("served", second, replace=True)
    assert (record["version"], record["pinned"]) == (2, True)
    after = client.answer(1, hidden, adapter="served")
    assert (before.adapter_versions, after.adapter_versions) == ({"served": 1}, {"served": 2})
    assert not torch.equal(before.hidden_states, after.hidden_states)
    assert [record["name"] for record in client.adapters()] == ["served"]
    assert client.adapter("served") == client.adapters()[0]
    assert client.unload_adapter("served")["version"] == 2
    assert client.adapters() == []


def test_an_unload_says_who_still_holds_the_adapter(running_service: RunningService, client: Client) -> None:
    client.load_adapter("held", running_service.write("held", 31))
    with ThreadPoolExecutor() as pool, running_service.engine.closed():
        running = pool.submit(client.forward, 1, hidden_states(TOKENS), adapter="held")
        assert running_service.engine.waiting.wait(30)
        with pytest.raises(ServiceError, match="1 request still holds it") as caught:
            client.unload_adapter("held", timeout_s=0.1)
        assert caught.value.status == 409
    assert running.result().shape == (TOKENS, hidden_states(1).shape[1])


@pytest.mark.parametrize("seconds", [0, 3, 0.1, 1e-7, 12345.678, 1e9, 1e22, float("inf"), np.float32(0.5)])
def test_the_seconds_of_an_unload_arrive_as_they_are(client: Client, seconds: float) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(parse_qs(request.url.query.decode(), strict_parsing=True))
        return httpx.Response(200, json={})

    with Client("http://nowhere", transport=httpx.MockTransport(answer)) as elsewhere:
        elsewhere.unload_adapter("a", timeout_s=seconds)
    assert [{name: list(map(float, values)) for name, values in query.items()} for query in asked] == [
        {"timeout_s": [float(seconds)]}
    ]
    with pytest.raises(ServiceError) as caught:
        client.unload_adapter("nowhere", timeout_s=seconds)
    assert caught.value.status == (404 if seconds <= 600 else 400)
    assert seconds <= 600 or "timeout_s: input should be less than or equal to 600" in caught.value.message


def test_numbers_that_are_none_are_not_sent(running_service: RunningService, client: Client) -> None:
    for seconds in (-1, float("nan")):
        with pytest.raises(RequestError, match="timeout_s should be a number of seconds"):
            client.unload_adapter("nowhere", timeout_s=seconds)
    layers: list[Any] = [1.0, "1", "1/infer?", None]
    for layer in layers:
        with pytest.raises(RequestError, match="layer should be the number of a layer, got ") as caught:
            client.forward(layer, hidden_states(1))
        assert caught.value.param == "layer"
    layer = np.int64(1)
    assert torch.equal(client.forward(layer, hidden_states(1)), running_service.output(hidden_states=hidden_states(1)))


def test_layers(client: Client) -> None:
    assert [card["layer"] for card in client.layers()] == list(LAYERS)
    assert client.describe()["skipped"] == {"0": "it is dense", "2": "it was left out"}


def test_errors_of_the_service(running_service: RunningService, client: Client) -> None:
    hidden = hidden_states(TOKENS)
    calls = {
        404: [lambda: client.forward(0, hidden), lambda: client.forward(1, hidden, adapter="nowhere"),
              lambda: client.unload_adapter("nowhere"), lambda: client.load_adapter("a", "nowhere"),
              lambda: client.adapter("no/where")],
        403: [lambda: client.load_adapter("a", "/etc")],
        400: [lambda: client.forward(1, hidden[:, 1:]), lambda: client.load_adapter("-", "x"),
              lambda: client.load_adapter("a", str(running_service.root / "dora"))],
    }  # fmt: skip
    for status, failing in calls.items():
        for call in failing:
            with pytest.raises(ServiceError) as caught:
                call()
            assert caught.value.status == status, caught.value
            assert caught.value.request_id
    with running_service.engine.failing(RuntimeError("broken")), pytest.raises(ServiceError) as caught:
        client.forward(1, hidden)
    assert caught.value.status == 500
    assert client.forward(1, hidden).isfinite().all()


def test_keys(open_engine: OpenEngine, tmp_path: Path) -> None:
    with running(open_engine, tmp_path, keys=Keys(["ordinary"], "admin")) as service:
        url, path = str(service.client.base_url), service.write("one", 11)
        for key, status in ((None, 401), ("wrong", 401), ("ordinary", None)):
            with Client(url, key) as client:
                if status is None:
                    assert client.forward(1, hidden_states(2)).isfinite().all()
                    status = 403
                with pytest.raises(ServiceError) as caught:
                    client.load_adapter("one", path)
                assert caught.value.status == status
        with Client(url, "admin") as client:
            assert client.load_adapter("one", path)["version"] == 1


def test_a_connection_that_the_service_ended_is_no_error(open_engine: OpenEngine, tmp_path: Path) -> None:
    with running(open_engine, tmp_path, keep_alive_s=1) as service:
        path = service.write("one", 11)
        with Client(str(service.client.base_url)) as client:
            client.forward(1, hidden_states(2))
            time.sleep(1.5)
            assert client.load_adapter("one", path)["version"] == 1


def test_time_that_runs_out(running_service: RunningService, client: Client) -> None:
    with running_service.engine.closed(), pytest.raises(ServiceTimeoutError) as caught:
        client.forward(1, hidden_states(TOKENS), timeout_s=0.2)
    assert caught.value.status in (None, 504)
    assert caught.value.request_id
    assert client.forward(1, hidden_states(TOKENS)).isfinite().all()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as client:
        for call in (client.layers, lambda: client.forward(0, hidden_states(1)), lambda: client.load_adapter("a", "b")):
            with pytest.raises(ServiceUnreachableError, match=f"http://127.0.0.1:{port} cannot be reached"):
                call()


def test_one_client_in_many_threads(running_service: RunningService, client: Client) -> None:
    names = [None, "one", "two"]
    client.load_adapter("one", running_service.write("one", 11))
    client.load_adapter("two", running_service.write("two", 12))
    inputs = [hidden_states(1 + number % 5, seed=number) for number in range(60)]
    wanted = [client.forward(1, hidden, adapter=names[i % 3]) for i, hidden in enumerate(inputs)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: client.forward(1, inputs[i], adapter=names[i % 3]), range(len(inputs))))
    assert all(map(torch.equal, got, wanted))
