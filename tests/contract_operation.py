"""The HTTP contract of health, listings, metrics, paths and request ids, for any engine."""

import json

import pytest

from contract_terms import ContractFixtures, assert_error
from running_service import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    RunningService,
    hidden_states,
)


class OperationContract(ContractFixtures):
    """What is the same whatever is served."""

    def test_health_ready_and_layers(self, service: RunningService) -> None:
        assert service.client.get("/health").status_code == 200
        assert service.client.get("/ready").json() == {"status": "ready"}
        told = service.client.get("/v1/layers").json()
        assert told["model"] == "small"
        assert told["device"] == service.service.engine.device
        assert told["skipped"] == {"0": "it is dense", "2": "it was left out"}
        assert [layer["layer"] for layer in told["layers"]] == [1, 3]
        first = told["layers"][0]
        sizes = ("hidden_size", "intermediate_size", "num_experts", "top_k")
        assert [first[name] for name in sizes] == [HIDDEN, WIDTH, EXPERTS, TOP_K]
        assert first["routing"]["method"] == "softmax_topk"
        assert first["routing"]["renormalize"] is True
        assert first["plans"] == [dict(plan) for plan in service.service.plans[1]]

    @pytest.mark.parametrize(
        "path", ["/", "/v1", "/v1/models/", "/v1/layers/1", "/v22", "/nothing?x=1", "/v1/adapters/a/b"]
    )
    def test_unknown_path(self, service: RunningService, path: str) -> None:
        assert_error(service.client.get(path), 404, path.partition("?")[0])

    def test_method_not_allowed(self, service: RunningService) -> None:
        refused = service.client.get("/v1/layers/1/forward")
        assert_error(refused, 405, "GET")
        assert refused.headers["allow"] == "POST"
        refused = service.client.patch("/v1/adapters/a")
        assert_error(refused, 405, "PATCH")
        assert refused.headers["allow"] == "DELETE, GET, HEAD, PUT"
        assert service.client.post("/docs").headers["allow"] == "GET, HEAD"

    @pytest.mark.parametrize(
        "path", ["/health", "/ready", "/metrics", "/v1/adapters", "/v1/nothing", "/openapi.json", "/v2", "/v2/models/x"]
    )
    def test_head_is_get_without_the_body(self, service: RunningService, path: str) -> None:
        there, asked = service.client.get(path), service.client.head(path)
        assert (asked.status_code, asked.content) == (there.status_code, b"")
        assert asked.headers["content-type"] == there.headers["content-type"]
        if path != "/metrics":  # which counts what asks for it
            assert asked.headers["content-length"] == str(len(there.content))

    @pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/layers/1/forward"])
    def test_request_id(self, service: RunningService, path: str) -> None:
        made = {service.client.get(path).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        for sane in ("mine-1", "a b", "x" * 128):
            assert service.client.get(path, headers={"X-Request-Id": sane}).headers["x-request-id"] == sane
        for other in ("x" * 129, "é".encode().decode("latin-1"), ""):
            echoed = service.client.get(path, headers={"X-Request-Id": other.encode("latin-1")}).headers["x-request-id"]
            assert echoed.isalnum()
            assert len(echoed) == 32

    def test_metrics_count(self, service: RunningService) -> None:
        def counts() -> list[float]:
            return [
                service.metric("moelet_requests_total", layer="1", outcome="ok"),
                service.metric("moelet_requests_total", layer="1", outcome="invalid"),
                service.metric("moelet_requests_total", layer="none", outcome="invalid"),
                service.metric("moelet_tokens_total", layer="1", outcome="ok"),
                service.metric("moelet_forward_seconds_count"),
                service.metric("moelet_adapter_loads_total", outcome="ok"),
                service.metric("moelet_adapter_loads_total", outcome="invalid"),
            ]

        before = counts()
        service.output(hidden_states=hidden_states(3))
        service.forward(hidden_states=[[1.0]])
        service.forward(9, hidden_states=[])
        service.load("a", "good")
        service.load("b", "absent")
        assert [after - b for after, b in zip(counts(), before, strict=True)] == [1, 1, 1, 3, 1, 1, 1]
        text = service.client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain")
        assert 'moelet_adapter_in_flight{adapter="a"} 0.0' in text.text

    def test_openapi_has_every_route(self, service: RunningService) -> None:
        document = service.client.get("/openapi.json").json()
        assert service.client.get("/docs").status_code == 200
        routes = {(path, method) for path, item in document["paths"].items() for method in item}
        assert {
            ("/v1/layers/{layer}/forward", "post"),
            ("/v1/load_lora_adapter", "post"),
            ("/v1/adapters/{name}", "put"),
            ("/health", "get"),
            ("/v2/models/{model}/infer", "post"),
        } <= routes
        text = json.dumps(document)
        for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
            assert name in document["components"]["schemas"]
        assert "422" not in text
