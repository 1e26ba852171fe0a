"""The contract of the Open Inference Protocol under ``/v2``, for any engine."""

import gzip
import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from contract_terms import ContractFixtures
from moelet.layer.errors import EngineError
from running_service import EXPERTS, HIDDEN, MAX_BODY_BYTES, TOP_K, RunningService, hidden_states
from v2_wire import json_request, output, request

BINARY = {"parameters": {"binary_data_output": True}}
INFER = "/v2/models/layers.1/infer"


def assert_v2_error(answer: httpx.Response, status: int, *words: str) -> None:
    """The protocol's own error shape."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert all(word in answer.json()["error"] for word in words), answer.text
    assert answer.headers["x-request-id"]
    assert "transfer-encoding" not in answer.headers


class V2Contract(ContractFixtures):
    """Inference, models and the repository, over HTTP written by hand."""

    def infer(self, service: RunningService, sent: tuple[bytes, int], **headers: str) -> httpx.Response:
        body, length = sent
        headers = {"Inference-Header-Content-Length": str(length), **headers}
        return service.client.post(INFER, content=body, headers=headers)

    @pytest.mark.parametrize("routing", ["gate", "logits", "top-k"])
    @pytest.mark.parametrize("adapters", [None, ["a", None, "b", "a", None], ["a"] * 5])
    def test_bits_are_those_of_the_native_protocol(
        self, service: RunningService, routing: str, adapters: list[str | None] | None
    ) -> None:
        service.load("a", service.write("v2-a", 1))
        service.load("b", service.write("v2-b", 2))
        sent: dict[str, Any] = {"hidden_states": hidden_states(5)}
        if routing == "logits":
            sent["router_logits"] = torch.randn(5, EXPERTS)
        elif routing == "top-k":
            sent |= {"topk_ids": torch.randint(-1, EXPERTS, (5, TOP_K)), "topk_weights": torch.rand(5, TOP_K)}
        native = service.output(**sent, adapters=adapters)
        if adapters is not None:
            sent["adapter"] = [name or "" for name in adapters]
        for answer in (
            self.infer(service, request(sent, **BINARY)),
            self.infer(service, request(sent)),
            service.client.post(INFER, content=json_request(sent, **BINARY)),
            service.client.post(INFER, content=json_request(sent)),
        ):
            assert answer.status_code == 200, answer.text
            head, hidden = output(answer)
            assert np.array_equal(hidden, native.numpy())
            versions = json.loads(head["parameters"]["adapter_versions"])
            assert set(versions) == {name for name in adapters or () if name}

    @pytest.mark.parametrize("sent", ["BF16", "FP16", "FP32"])
    @pytest.mark.parametrize("asked", ["BF16", "FP16", "FP32"])
    @pytest.mark.parametrize("binary", [True, False])
    def test_datatypes(self, service: RunningService, sent: str, asked: str, binary: bool) -> None:
        hidden = hidden_states(2)
        parameters = {"binary_data_output": binary, "output_datatype": asked}
        answer = self.infer(service, request({"hidden_states": hidden}, {"hidden_states": sent}, parameters=parameters))
        head, got = output(answer)
        assert head["outputs"][0]["datatype"] == asked
        expected = service.output(hidden_states=hidden.half().float() if sent == "FP16" else hidden)
        assert np.array_equal(got, expected.half().float() if asked == "FP16" else expected)

    def test_answer_says_what_it_is(self, service: RunningService, name: str) -> None:
        service.load(name, "good")
        parameters = {"adapter": name, **BINARY["parameters"]}
        outputs = [{"name": "hidden_states", "parameters": {"binary_data": False}}]
        sent = request({"hidden_states": hidden_states(2)}, id="mine é", parameters=parameters, outputs=outputs)
        answer = self.infer(service, sent)
        head, _ = output(answer)
        [told] = head.pop("outputs")
        assert len(told.pop("data")) == 2 * HIDDEN
        assert told == {"name": "hidden_states", "datatype": "FP32", "shape": [2, HIDDEN]}
        versions = {"adapter_versions": json.dumps({name: 1}, separators=(",", ":"))}
        assert head == {"model_name": "layers.1", "model_version": "1", "id": "mine é", "parameters": versions}
        assert answer.headers["content-type"] == "application/json"
        assert "inference-header-content-length" not in answer.headers
        outputs[0]["parameters"]["binary_data"] = True
        answer = self.infer(service, request({"hidden_states": hidden_states(2)}, outputs=outputs))
        assert answer.headers["content-type"] == "application/octet-stream"
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert "transfer-encoding" not in answer.headers

    @pytest.mark.parametrize(
        "more", [{}, {"adapter": []}, {"adapter": ["a"]}, {"router_logits": np.ones((0, EXPERTS))}]
    )
    def test_no_tokens_give_an_empty_result(self, service: RunningService, more: dict[str, Any]) -> None:
        service.load("a", "good")
        sent = {"hidden_states": np.ones((0, HIDDEN)), **more}
        for answer in (self.infer(service, request(sent)), service.client.post(INFER, content=json_request(sent))):
            head, hidden = output(answer)
            assert hidden.shape == (0, HIDDEN)
            named = "a" in more.get("adapter", ())
            assert json.loads(head["parameters"]["adapter_versions"]).keys() == ({"a"} if named else set())

    def test_what_is_not_finite_stays_in_its_token(self, service: RunningService) -> None:
        hidden = hidden_states(3)
        clean = service.output(hidden_states=hidden).numpy()
        hidden[1, 5] = float("nan")
        _, got = output(self.infer(service, request({"hidden_states": hidden}, **BINARY)))
        assert np.isnan(got[1]).all()
        assert np.array_equal(got[[0, 2]], clean[[0, 2]])
        told = self.infer(service, request({"hidden_states": hidden})).json()["outputs"][0]["data"]
        assert told[HIDDEN : 2 * HIDDEN] == [None] * HIDDEN
        assert service.client.post(INFER, content=json_request({"hidden_states": hidden})).status_code == 200

    @pytest.mark.parametrize("coding", ["gzip", "deflate"])
    def test_bodies_may_be_compressed(self, service: RunningService, coding: str) -> None:
        compress = {"gzip": gzip.compress, "deflate": zlib.compress}[coding]
        sent = {"hidden_states": hidden_states(40)}
        body, length = request(sent, **BINARY)
        plain = self.infer(service, (body, length))
        assert "content-encoding" not in plain.headers
        headers = {"Content-Encoding": coding, "Accept-Encoding": coding}
        packed = self.infer(service, (compress(body), length), **headers)
        assert packed.headers["content-encoding"] == coding
        assert packed.content == plain.content
        assert int(packed.headers["content-length"]) != len(plain.content)

    def test_compressed_bodies_that_are_refused(self, service: RunningService) -> None:
        body, length = request({"hidden_states": hidden_states(2)})

        def refused(content: bytes, coding: str, status: int, *words: str) -> None:
            assert_v2_error(self.infer(service, (content, length), **{"Content-Encoding": coding}), status, *words)

        packed = gzip.compress(body)
        refused(packed, "deflate", 400, "deflate")
        refused(zlib.compress(body)[2:-4], "deflate", 400, "deflate")
        refused(packed[:-1], "gzip", 400, "ends before")
        refused(packed + b"x", "gzip", 400, "1 bytes")
        refused(packed + packed, "gzip", 400, "bytes after")
        refused(b"", "gzip", 400, "ends before")
        refused(body, "br", 415, "gzip or deflate", "br")
        refused(body, "gzip, gzip", 415, "gzip, gzip")
        refused(gzip.compress(b" " * (MAX_BODY_BYTES + 1)), "gzip", 413, "1 MiB")
        refused(gzip.compress(b" " * (100 * MAX_BODY_BYTES)), "gzip", 413, "1 MiB")
        refused(gzip.compress(b" " * MAX_BODY_BYTES), "gzip", 400, "JSON")

    def test_errors_of_every_layer_have_the_protocol_s_shape(self, service: RunningService) -> None:
        client = service.client
        assert_v2_error(client.get("/v2/nothing"), 404, "GET /v2/nothing")
        assert_v2_error(client.get("/v2/"), 404)
        assert_v2_error(client.get("/v2/models//ready"), 404)
        refused = client.get(INFER)
        assert_v2_error(refused, 405, "GET")
        assert refused.headers["allow"] == "POST"
        assert client.post("/v2/health/live").headers["allow"] == "GET, HEAD"
        assert_v2_error(client.post(INFER, content=b" " * (MAX_BODY_BYTES + 1)), 413, "1 MiB")
        sent = request({"hidden_states": hidden_states(1)})
        with service.engine.failing(EngineError("out of memory")):
            assert_v2_error(self.infer(service, sent), 500, "out of memory")
        with service.engine.failing(ValueError("a secret")):
            failed = self.infer(service, sent)
        assert_v2_error(failed, 500)
        assert "secret" not in failed.text
        assert self.infer(service, sent).status_code == 200

    def test_a_body_of_unknown_length(self, service: RunningService) -> None:
        body, length = request({"hidden_states": hidden_states(3)})

        def chunks() -> Iterator[bytes]:
            yield from (body[i : i + 7] for i in range(0, len(body), 7))

        headers = {"Inference-Header-Content-Length": str(length)}
        answer = service.client.post(INFER, content=chunks(), headers=headers)
        assert answer.content == self.infer(service, (body, length)).content

    @pytest.mark.parametrize(
        "model", ["layers.0", "layers.2", "layers.01", "layers.", "layers.x", "x", "layers.1/x", "é"]
    )
    def test_model_that_is_not_served(self, service: RunningService, model: str) -> None:
        for path in (f"/v2/models/{model}", f"/v2/models/{model}/ready"):
            assert_v2_error(service.client.get(path), 404)
        assert_v2_error(service.client.post(f"/v2/models/{model}/infer"), 404)

    @pytest.mark.parametrize("sent", [{"parameters": {"adapter": "x"}}, {}])
    def test_adapter_that_is_not_loaded(self, service: RunningService, sent: dict[str, Any]) -> None:
        service.load("a", "good")
        named = {} if sent else {"adapter": ["a", "x"]}
        answer = self.infer(service, request({"hidden_states": hidden_states(2), **named}, **sent))
        assert_v2_error(answer, 404, "loaded: a")
        assert service.records()[0]["in_flight"] == 0

    @pytest.mark.parametrize("way", ["parameter", "header"])
    def test_a_request_past_its_timeout_is_not_computed(self, service: RunningService, way: str) -> None:
        """The earlier of both counts."""
        hidden = hidden_states(2).numpy()
        soon, late = (40_000, "9000") if way == "parameter" else (9_000_000, "40")
        timed = request({"hidden_states": hidden}, parameters={"timeout": soon})
        with ThreadPoolExecutor() as pool, service.engine.closed():
            running = pool.submit(self.infer, service, request({"hidden_states": hidden}))
            assert service.engine.waiting.wait(10)
            answer = self.infer(service, timed, **{"X-Request-Timeout-Ms": late})
            assert (answer.status_code, answer.json()) == (
                504,
                {"error": "the request was not answered within its 40 ms"},
            )
        assert running.result().status_code == 200
        assert_v2_error(self.infer(service, timed, **{"X-Request-Timeout-Ms": "soon"}), 400, "milliseconds")

    def test_server_and_models(self, service: RunningService) -> None:
        client = service.client
        assert client.get("/v2").json()["extensions"] == ["binary_tensor_data", "model_repository", "parameters"]
        assert client.get("/v2/health/live").json() == {"live": True}
        assert client.get("/v2/health/ready").json() == {"ready": True}
        told = client.get("/v2/models/layers.3").json()
        assert told == client.get("/v2/models/layers.3/versions/1").json()
        shapes = {item["name"]: (item["datatype"], item["shape"]) for item in told["inputs"]}
        assert shapes == {
            "hidden_states": ("BF16", [-1, HIDDEN]),
            "topk_ids": ("INT32", [-1, TOP_K]),
            "topk_weights": ("FP32", [-1, TOP_K]),
            "router_logits": ("FP32", [-1, EXPERTS]),
            "adapter": ("BYTES", [-1]),
        }
        assert told["outputs"] == [{"name": "hidden_states", "datatype": "BF16", "shape": [-1, HIDDEN]}]
        assert client.get("/v2/models/layers.3/versions/1/ready").json() == {"name": "layers.3", "ready": True}
        assert_v2_error(client.get("/v2/models/layers.3/versions/2"), 404, "version '2'")

    def test_adapters_are_models_of_the_repository(self, service: RunningService, name: str) -> None:
        def index() -> dict[str, str]:
            listed = service.client.post("/v2/repository/index").json()
            assert {item["state"] for item in listed} == {"READY"}
            return {item["name"]: item["version"] for item in listed}

        def post(change: str, **body: Any) -> httpx.Response:
            return service.client.post(f"/v2/repository/models/{name}/{change}", json=body)

        layers = {"layers.1": "1", "layers.3": "1"}
        assert index() == layers
        assert_v2_error(service.client.post("/v2/repository/index", json={"ready": 1}), 400, "ready", "a number")
        config = {"parameters": {"config": json.dumps({"lora_path": "good"})}}
        assert post("load", **config).json() == {"name": name, "version": "1", "state": "READY"}
        assert post("load", **config).json()["version"] == "2"
        assert index() == {**layers, name: "2"}
        assert service.client.get(f"/v2/models/{name}/ready").status_code == 200
        assert service.client.get(f"/v2/models/{name}").json()["versions"] == ["2"]
        assert_v2_error(service.client.post(f"/v2/models/{name}/infer"), 404, "is an adapter")
        assert_v2_error(post("load"), 400, "config")
        assert_v2_error(post("load", parameters={"config": "{}"}), 400, "lora_path")
        assert_v2_error(post("load", parameters={**config["parameters"], "file:x": "eA=="}), 400, "file:x")
        assert index() == {**layers, name: "2"}
        assert post("unload", parameters={"unload_dependents": False}).status_code == 200
        assert_v2_error(post("unload"), 404, name)
        assert index() == layers

    def test_an_adapter_with_the_name_of_a_layer_can_be_unloaded(self, service: RunningService) -> None:
        path = "/v2/repository/models/layers.1/unload"
        assert_v2_error(service.client.post(path), 400, "layers.1 is a layer")
        assert service.load("layers.1", "good").status_code == 200
        assert service.client.post(path).json() == {"name": "layers.1", "version": "1", "state": "UNAVAILABLE"}
        assert service.records() == []

    @pytest.mark.parametrize(
        ("model", "config", "status", "said"),
        [
            ("a", '{"lora_path": "absent"}', 404, "no adapter found at absent"),
            ("a", '{"lora_path": "../outside"}', 403, "../outside lies outside"),
            ("a", '{"lora_path": "dora"}', 400, "use_dora"),
            ("a", '{"lora_path": "good", "pinned": 1}', 400, "pinned should be a boolean"),
            ("a", '{"lora_path": "good"', 400, "the parameter config is not valid JSON"),
            ("a", '["good"]', 400, "the parameter config should be a JSON object, got a list"),
            ("a", {"lora_path": "good"}, 400, "the parameter config should be a string"),
            (".a", '{"lora_path": "good"}', 400, "must match"),
            ("layers.1", '{"lora_path": "good"}', 400, "layers.1 is a layer"),
        ],
    )
    def test_loads_that_are_refused(
        self, service: RunningService, model: str, config: Any, status: int, said: str
    ) -> None:
        path = f"/v2/repository/models/{model}/load"
        assert_v2_error(service.client.post(path, json={"parameters": {"config": config}}), status, said)
        assert service.records() == []
