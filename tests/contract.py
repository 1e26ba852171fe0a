"""The HTTP contract as tests that any ``Engine`` must pass: subclass ``ServiceContract`` beside an ``open_engine``."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from oracle import assert_layer_close_to_truth
from running_service import (
    EXPERTS,
    HIDDEN,
    MAX_BODY_BYTES,
    TOP_K,
    WIDTH,
    OpenEngine,
    RunningService,
    hidden_states,
    random_adapter,
    running,
    write_adapter,
)


def assert_error(answer: httpx.Response, status: int, *words: str, param: str | None = None) -> None:
    """The one error shape, with ``status`` and a message that has ``words``."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    types = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 409: "ConflictError"}
    types |= {405: "MethodNotAllowedError", 413: "RequestTooLargeError", 500: "InternalServerError"}
    types |= {503: "ServiceUnavailableError"}
    assert error["type"] == types[status]
    assert all(word in error["message"] for word in words), error["message"]
    if param is not None:
        assert error["param"] == param
    assert answer.headers["x-request-id"]


HIDDEN_2 = hidden_states(2).tolist()
TOPK = {"topk_ids": [[0, 1], [2, 3]], "topk_weights": [[0.5, 0.5], [0.25, 1.5]]}
ROUTER_LOGITS = [[0.0] * EXPERTS] * 2

BAD_FORWARDS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "no hidden states": ({}, "hidden_states", ("required",)),
    "null": ({"hidden_states": None}, "hidden_states", ("required",)),
    "a string": ({"hidden_states": "x"}, "hidden_states", ("a string",)),
    "one row": ({"hidden_states": [1.0] * HIDDEN}, "hidden_states", (f"[{HIDDEN}]",)),
    "three dimensions": ({"hidden_states": [HIDDEN_2]}, "hidden_states", (f"[1, 2, {HIDDEN}]",)),
    "width": ({"hidden_states": [[1.0] * (HIDDEN - 1)]}, "hidden_states", (str(HIDDEN), f"[1, {HIDDEN - 1}]")),
    "ragged": ({"hidden_states": [[1.0] * HIDDEN, [1.0]]}, "hidden_states", ("different lengths",)),
    "empty row": ({"hidden_states": [[]]}, "hidden_states", ("[1, 0]",)),
    "strings": ({"hidden_states": [["1"] * HIDDEN]}, "hidden_states", ("a string",)),
    "a null among": ({"hidden_states": [[None] + [1.0] * (HIDDEN - 1)]}, "hidden_states", ("null",)),
    "a boolean among": ({"hidden_states": [[True] + [1.0] * (HIDDEN - 1)]}, "hidden_states", ("a boolean",)),
    "objects": ({"hidden_states": [[{}] * HIDDEN]}, "hidden_states", ("an object",)),
    "unknown field": ({"hidden_states": HIDDEN_2, "topk_idx": []}, "topk_idx", ("unknown", "topk_ids")),
    "ids alone": ({"hidden_states": HIDDEN_2, "topk_ids": TOPK["topk_ids"]}, "topk_weights", ("together",)),
    "weights alone": ({"hidden_states": HIDDEN_2, "topk_weights": TOPK["topk_weights"]}, "topk_ids", ("together",)),
    "top-k and logits": ({"hidden_states": HIDDEN_2, **TOPK, "router_logits": ROUTER_LOGITS}, "router_logits", ()),
    "ids too few": ({"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0, 1]]}, "topk_ids", ("[1, 2]",)),
    "no ids for two tokens": ({"hidden_states": HIDDEN_2, **TOPK, "topk_ids": []}, "topk_ids", ("2 rows",)),
    "ids too wide": ({"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0] * 3] * 2}, "topk_ids", ("[2, 3]",)),
    "id too high": (
        {"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0, EXPERTS], [0, 0]]},
        "topk_ids",
        (f"-1..{EXPERTS - 1}", f"got {EXPERTS}"),
    ),
    "id too low": ({"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0, -2], [0, 0]]}, "topk_ids", ("got -2",)),
    "id that wraps": (
        {"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0, 2**32], [0, 0]]},
        "topk_ids",
        (f"got {2**32}",),
    ),
    "fractional id": ({"hidden_states": HIDDEN_2, **TOPK, "topk_ids": [[0, 0.5], [0, 0]]}, "topk_ids", ("whole",)),
    "logits": ({"hidden_states": HIDDEN_2, "router_logits": [[0.0] * 5] * 2}, "router_logits", ("[2, 5]",)),
    "both adapters": ({"hidden_states": HIDDEN_2, "adapter": "a", "adapters": ["a", None]}, "adapters", ("both",)),
    "adapter number": ({"hidden_states": HIDDEN_2, "adapter": 0}, "adapter", ("a number",)),
    "adapters string": ({"hidden_states": HIDDEN_2, "adapters": "a"}, "adapters", ("a string",)),
    "adapters number": ({"hidden_states": HIDDEN_2, "adapters": [None, 0]}, "adapters", ("a number",)),
    "adapters too few": ({"hidden_states": HIDDEN_2, "adapters": [None]}, "adapters", ("2 tokens", "got 1")),
}

BAD_BODIES = [b"", b"{", b"[]", b"3", b'"text"', b"null", b"\xff{}", b'{"hidden_states": [[NaN}', b"[" * 5000]

BAD_LOADS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "no name": ({"lora_path": "good"}, 400, ("lora_name",)),
    "no path": ({"lora_name": "a"}, 400, ("lora_path",)),
    "empty path": ({"lora_name": "a", "lora_path": ""}, 400, ("lora_path",)),
    "NUL in the path": ({"lora_name": "a", "lora_path": "good\0"}, 400, ("lora_path",)),
    "name a number": ({"lora_name": 1, "lora_path": "good"}, 400, ("lora_name",)),
    "empty name": ({"lora_name": "", "lora_path": "good"}, 400, ("name",)),
    "name with a slash": ({"lora_name": "a/b", "lora_path": "good"}, 400, ("a/b",)),
    "name with a dot first": ({"lora_name": ".a", "lora_path": "good"}, 400, (".a",)),
    "name too long": ({"lora_name": "a" * 129, "lora_path": "good"}, 400, ("name",)),
    "name with a newline": ({"lora_name": "a\n", "lora_path": "good"}, 400, ("name",)),
    "in place a string": ({"lora_name": "a", "lora_path": "good", "load_inplace": "yes"}, 400, ("load_inplace",)),
    "taken": ({"lora_name": "kept", "lora_path": "good"}, 400, ("kept", "load_inplace")),
    "no folder": ({"lora_name": "a", "lora_path": "absent"}, 404, ("absent",)),
    "no config": ({"lora_name": "a", "lora_path": "empty"}, 404, ("adapter_config.json",)),
    "dora": ({"lora_name": "a", "lora_path": "dora"}, 400, ("use_dora",)),
    "rank": ({"lora_name": "a", "lora_path": "rank9"}, 400, ("8", "9")),
    "weights of another shape": ({"lora_name": "a", "lora_path": "narrow"}, 400, ()),
    "truncated": ({"lora_name": "a", "lora_path": "truncated"}, 400, ()),
    "outside": ({"lora_name": "a", "lora_path": "/etc"}, 403, ("/etc",)),
    "outside and absent": ({"lora_name": "a", "lora_path": "/etc/absent"}, 403, ("/etc/absent",)),
    "parent": ({"lora_name": "a", "lora_path": "../outside"}, 403, ("../outside",)),
    "a link out": ({"lora_name": "a", "lora_path": "link"}, 403, ("link",)),
    "weights linked out": ({"lora_name": "a", "lora_path": "linked_weights"}, 403, ("adapter_model",)),
    "in place, broken": ({"lora_name": "kept", "lora_path": "dora", "load_inplace": True}, 400, ("use_dora",)),
    "in place, absent": ({"lora_name": "kept", "lora_path": "absent", "load_inplace": True}, 404, ("absent",)),
}


class ServiceContract:
    """What every engine's service does over HTTP; the subclass's module has a module-scoped fixture
    ``open_engine``, an ``OpenEngine``."""

    @pytest.fixture
    def service(self, running_service: RunningService) -> Iterator[RunningService]:
        yield running_service
        running_service.unload_all()
        assert running_service.service.lifecycle.in_flight == 0
        assert running_service.metric("moelet_requests_in_flight") == 0
        assert running_service.metric("moelet_queue_requests") == 0
        assert running_service.metric("moelet_queue_tokens") == 0

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        """A name that no other test uses, so that its versions begin at 1."""
        return request.node.name.replace("[", ".").replace("]", "")[:128]

    # forwards

    @pytest.mark.parametrize("layer", [1, 3])
    @pytest.mark.parametrize("routing", ["gate", "logits", "top-k"])
    @pytest.mark.parametrize("adapters", [None, ["a", None, "b", "a", None]])
    def test_forward_equals_the_oracle(
        self, service: RunningService, layer: int, routing: str, adapters: list[str | None] | None
    ) -> None:
        for name, seed in (("a", 1), ("b", 2)):
            assert service.load(name, service.write(name, seed, rank=2 + seed)).status_code == 200
        hidden, seeded = hidden_states(5), torch.Generator().manual_seed(3)
        logits = torch.randn(5, EXPERTS, generator=seeded)
        ids = torch.stack([torch.randperm(EXPERTS, generator=seeded)[:TOP_K] for _ in range(5)])
        ids[1, 0] = -1
        sent: dict[str, Any] = {
            "gate": {},
            "logits": {"router_logits": logits},
            "top-k": {"topk_ids": ids, "topk_weights": torch.rand(5, TOP_K, generator=seeded)},
        }[routing]
        value = service.output(layer, hidden_states=hidden, **sent, adapters=adapters)
        slots = None if adapters is None else [{None: -1, "a": 0, "b": 1}[name] for name in adapters]
        batch = LayerBatch(
            layer=layer,
            hidden_states=hidden.bfloat16(),
            token_slots=None if slots is None else torch.tensor(slots, dtype=torch.int32),
            **{name: tensor.int() if name == "topk_ids" else tensor for name, tensor in sent.items()},
        )
        loaded = [service.adapters["a"], service.adapters["b"]]
        spec = service.service.model.layers[layer]
        assert_layer_close_to_truth(value.bfloat16(), spec, service.weights[layer], batch, loaded)

    def test_answer_says_what_it_is(self, service: RunningService, name: str) -> None:
        service.load(name, "good")
        answer = service.forward(3, hidden_states=hidden_states(2), adapters=[None, name]).json()
        rows = answer.pop("hidden_states")
        assert [len(row) for row in rows] == [HIDDEN, HIDDEN]
        assert answer == {"layer": 3, "num_tokens": 2, "adapter_versions": {name: 1}}

    def test_one_name_for_all_is_that_name_for_each(self, service: RunningService) -> None:
        service.load("a", "good")
        hidden = hidden_states(3)
        for_all = service.output(hidden_states=hidden, adapter="a")
        assert torch.equal(for_all, service.output(hidden_states=hidden, adapters=["a"] * 3))
        assert not torch.equal(for_all, service.output(hidden_states=hidden))

    @pytest.mark.parametrize("fields", [{}, {**{k: [] for k in TOPK}}, {"router_logits": []}, {"adapters": []}])
    def test_no_tokens_give_an_empty_result(self, service: RunningService, fields: dict[str, Any]) -> None:
        answer = service.forward(hidden_states=[], **fields)
        assert answer.status_code == 200
        assert answer.json() == {"hidden_states": [], "layer": 1, "num_tokens": 0, "adapter_versions": {}}

    def test_no_tokens_still_need_a_loaded_adapter(self, service: RunningService, name: str) -> None:
        assert_error(service.forward(hidden_states=[], adapter="none-such"), 404, "none-such")
        service.load(name, "good")
        assert service.forward(hidden_states=[], adapter=name).json()["adapter_versions"] == {name: 1}
        assert service.records()[0]["in_flight"] == 0

    @pytest.mark.parametrize("bare", ["NaN", "Infinity", "-Infinity"])
    def test_what_is_not_finite_stays_in_its_token(self, service: RunningService, bare: str) -> None:
        hidden = hidden_states(3)
        clean = service.output(hidden_states=hidden)
        rows = json.dumps(hidden.tolist()).replace(json.dumps(hidden[1, 5].item()), bare)
        answer = service.client.post("/v1/layers/1/forward", content=f'{{"hidden_states": {rows}}}')
        assert answer.status_code == 200
        got = answer.json()["hidden_states"]
        assert None in got[1]
        assert torch.equal(torch.tensor([got[0], got[2]]), clean[[0, 2]])

    def test_more_adapters_than_slots_give_the_same_bits(self, service: RunningService) -> None:
        names = [f"s{i}" for i in range(5)]
        for i, name in enumerate(names):
            service.load(name, service.write(name, 10 + i))
        assert len(names) > service.service.engine.max_loras
        hidden = hidden_states(11)
        order = [*names, None, *reversed(names)]
        together = service.output(hidden_states=hidden, adapters=order)
        for i, name in enumerate(order):
            alone = service.output(hidden_states=hidden[i : i + 1], adapter=name)
            assert torch.equal(together[i], alone[0]), (i, name)

    def test_pinned_adapters_leave_slots_for_the_others(self, service: RunningService) -> None:
        for i in range(5):
            service.load(f"s{i}", service.write(f"s{i}", 10 + i), pinned=i < 2)
        hidden = hidden_states(5)
        service.output(hidden_states=hidden[:2], adapters=["s0", "s1"])
        order = ["s2", "s3", "s4", "s0", "s1"]
        together = service.output(hidden_states=hidden, adapters=order)
        for i, name in enumerate(order):
            assert torch.equal(together[i], service.output(hidden_states=hidden[i : i + 1], adapter=name)[0])

    @pytest.mark.parametrize("case", BAD_FORWARDS)
    def test_bad_forward(self, service: RunningService, case: str) -> None:
        body, param, words = BAD_FORWARDS[case]
        service.load("a", "good")
        before = service.records()
        assert_error(service.forward(**body), 400, *words, param=param)
        assert service.records() == before

    @pytest.mark.parametrize("body", BAD_BODIES)
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/v1/layers/1/forward"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
            ("PUT", "/v1/adapters/a"),
        ],
    )
    def test_malformed_body(self, service: RunningService, method: str, path: str, body: bytes) -> None:
        assert_error(service.client.request(method, path, content=body), 400)
        assert service.records() == []

    @pytest.mark.parametrize("layer", ["0", "2", "4", "-1", "1.0", "one", "9" * 30, "١"])
    def test_layer_that_is_not_served(self, service: RunningService, layer: str) -> None:
        assert_error(service.forward(layer, hidden_states=[]), 404, "1,3", param="layer")

    @pytest.mark.parametrize("fields", [{"adapter": "x"}, {"adapters": ["a", "x"]}, {"adapter": ""}])
    def test_adapter_that_is_not_loaded(self, service: RunningService, fields: dict[str, Any]) -> None:
        service.load("a", "good")
        assert_error(service.forward(hidden_states=hidden_states(2), **fields), 404, "loaded: a")
        assert service.records()[0]["in_flight"] == 0

    def test_body_over_the_limit(self, service: RunningService) -> None:
        def chunks() -> Iterator[bytes]:
            for _ in range(3 * MAX_BODY_BYTES // 65536):
                yield b" " * 65536

        whole = service.client.post("/v1/layers/1/forward", content=b" " * (MAX_BODY_BYTES + 1))
        assert_error(whole, 413, "1 MiB")
        assert whole.headers["connection"] == "close"
        with httpx.Client(base_url=service.client.base_url) as client:
            try:
                chunked = client.post("/v1/load_lora_adapter", content=chunks())
            except httpx.WriteError:
                pass  # the service answered and closed before the body was sent
            else:
                assert_error(chunked, 413, "1 MiB")
        assert_error(service.client.post("/v1/layers/1/forward", content=b" " * MAX_BODY_BYTES), 400)

    def test_a_failing_forward_takes_no_other_down(self, service: RunningService) -> None:
        service.load("a", "good")
        hidden = hidden_states(2)
        before = service.output(hidden_states=hidden, adapter="a")
        with service.engine.failing(EngineError("out of memory")):
            assert_error(service.forward(hidden_states=hidden, adapter="a"), 500, "out of memory")
        with service.engine.failing(ValueError("a secret")):
            failed = service.forward(hidden_states=hidden, adapter="a")
        assert_error(failed, 500)
        assert "secret" not in failed.text
        assert torch.equal(service.output(hidden_states=hidden, adapter="a"), before)
        assert service.records()[0]["in_flight"] == 0

    # adapters

    def test_record(self, service: RunningService, name: str) -> None:
        created = service.client.put(f"/v1/adapters/{name}", json={"path": "good", "pinned": True})
        assert created.status_code == 201
        record = created.json()
        assert record == {
            "name": name,
            "version": 1,
            "path": "good",
            "rank": 3,
            "lora_alpha": 6.0,
            "scaling": 2.0,
            "layout": "per_expert",
            "layers": [1, 3],
            "targets": ["gate", "up", "down"],
            "bytes": record["bytes"],
            "resident": "host",
            "slot": None,
            "in_flight": 0,
            "pinned": True,
            "ignored_keys": [],
        }
        loras = [lora for layer in random_adapter(1).layers.values() for _, lora in layer.items()]
        assert record["bytes"] >= sum(2 * lora.a.numel() + 2 * lora.b.numel() for lora in loras)
        assert service.client.get(f"/v1/adapters/{name}").json() == record
        assert service.records() == [record]
        service.output(hidden_states=hidden_states(1), adapter=name)
        used = service.client.get(f"/v1/adapters/{name}").json()
        on_gpu = service.service.engine.device.startswith("cuda")
        assert (used["resident"], used["slot"]) == ("gpu" if on_gpu else "host", 0)

    def test_put_replaces_and_keeps_the_pin_unless_told(self, service: RunningService, name: str) -> None:
        service.client.put(f"/v1/adapters/{name}", json={"path": "good", "pinned": True})
        again = service.client.put(f"/v1/adapters/{name}", json={"path": str(service.root / "good"), "more": 1})
        assert again.status_code == 200
        assert (again.json()["version"], again.json()["pinned"]) == (2, True)
        assert (
            service.client.put(f"/v1/adapters/{name}", json={"path": "good", "pinned": False}).json()["pinned"] is False
        )

    def test_load_and_unload_as_vllm_controllers_do(self, service: RunningService) -> None:
        loaded = service.load("a", "good", base_model_name="small", lora_int_id=7)
        assert (loaded.status_code, loaded.headers["content-type"].partition(";")[0]) == (200, "text/plain")
        models = service.client.get("/v1/models").json()
        assert models["object"] == "list"
        assert [(m["id"], m["object"], m["root"], m["parent"]) for m in models["data"]] == [
            ("small", "model", "small", None),
            ("a", "model", "good", "small"),
        ]
        body = {"lora_name": "a", "lora_int_id": 7}
        unloaded = service.client.post("/v1/unload_lora_adapter", json=body)
        assert (unloaded.status_code, unloaded.headers["content-type"].partition(";")[0]) == (200, "text/plain")
        assert [m["id"] for m in service.client.get("/v1/models").json()["data"]] == ["small"]
        assert_error(service.client.post("/v1/unload_lora_adapter", json=body), 404, "'a'")

    def test_bodies_need_no_content_type(self, service: RunningService) -> None:
        for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
            answer = service.client.put(
                "/v1/adapters/a", content=b'{"path": "good"}', headers={"Content-Type": content_type}
            )
            assert answer.status_code in (200, 201), answer.text

    def test_the_call_after_a_load_sees_the_new_weights(self, service: RunningService) -> None:
        hidden = hidden_states(3)
        service.load("one", service.write("one", 1))
        service.load("two", service.write("two", 2))
        expected = [service.output(hidden_states=hidden, adapter=name) for name in ("one", "two")]
        assert not torch.equal(*expected)
        for i in range(6):
            name = ("one", "two")[i % 2]
            assert service.load("swapped", name, load_inplace=True).status_code == 200
            answer = service.forward(hidden_states=hidden, adapter="swapped").json()
            assert answer["adapter_versions"] == {"swapped": i + 1}
            assert torch.equal(torch.tensor(answer["hidden_states"]), expected[i % 2])

    @pytest.mark.parametrize("case", BAD_LOADS)
    def test_bad_load_changes_nothing(self, service: RunningService, case: str) -> None:
        body, status, words = BAD_LOADS[case]
        service.load("kept", "good")
        hidden = hidden_states(2)
        output = service.output(hidden_states=hidden, adapter="kept")
        before = service.records()
        refused = service.client.post("/v1/load_lora_adapter", json=body)
        assert_error(refused, status, *words)
        assert str(service.root) not in refused.text
        if body.get("lora_name") == "a" and "lora_path" in body and "load_inplace" not in body:
            put = service.client.put("/v1/adapters/a", json={"path": body["lora_path"]})
            assert_error(put, status, *(word.replace("lora_path", "path") for word in words))
        assert service.records() == before
        assert torch.equal(service.output(hidden_states=hidden, adapter="kept"), output)

    def test_outside_is_told_in_the_same_words_whether_it_exists(self, service: RunningService) -> None:
        (there, absent) = (service.load("a", path).json()["error"] for path in ("/etc", "/etx"))
        assert there["message"].replace("/etc", "…") == absent["message"].replace("/etx", "…")

    def test_no_root_turns_loading_off(self, open_engine: OpenEngine, tmp_path: Path) -> None:
        with running(open_engine, None) as service:
            good = write_adapter(tmp_path / "good", random_adapter(1))
            for path in (str(good), "/etc/absent"):
                assert_error(service.load("a", path), 403, "--adapter-root")
                assert_error(service.client.put("/v1/adapters/a", json={"path": path}), 403, "--adapter-root")
            assert service.records() == []

    def test_several_roots(self, open_engine: OpenEngine, tmp_path: Path) -> None:
        roots = [tmp_path / "first", tmp_path / "second"]
        for i, root in enumerate(roots):
            write_adapter(root / f"only{i}", random_adapter(i))
            write_adapter(root / "both", random_adapter(7 + i, rank=2 + i))
        with running(open_engine, roots[0], more_roots=roots[1:]) as service:
            for path in ("only0", "only1", str(roots[1] / "both")):
                assert service.load("a", path, load_inplace=True).status_code == 200
            assert service.records()[0]["rank"] == 3
            service.load("a", "both", load_inplace=True)
            assert service.records()[0]["rank"] == 2

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/adapters/none"), ("DELETE", "/v1/adapters/none"), ("GET", "/v1/adapters/ ")]
    )
    def test_no_such_adapter(self, service: RunningService, method: str, path: str) -> None:
        service.load("kept", "good")
        assert_error(service.client.request(method, path), 404, "kept")

    def test_delete_gives_the_last_record(self, service: RunningService, name: str) -> None:
        service.load(name, "good")
        record = service.client.get(f"/v1/adapters/{name}").json()
        assert service.client.delete(f"/v1/adapters/{name}").json() == record
        assert service.records() == []
        service.load(name, "good")
        assert service.records()[0]["version"] == 2

    @pytest.mark.parametrize("timeout", ["-1", "601", "nan", "soon", ""])
    def test_delete_takes_a_bounded_timeout(self, service: RunningService, timeout: str) -> None:
        service.load("a", "good")
        answer = service.client.delete("/v1/adapters/a", params={"timeout_s": timeout})
        assert_error(answer, 400, "timeout_s", param="timeout_s")
        assert len(service.records()) == 1

    def test_delete_waits_for_requests_in_flight(self, service: RunningService, name: str) -> None:
        service.load(name, "good")
        hidden = hidden_states(2)
        expected = service.output(hidden_states=hidden, adapter=name)
        with ThreadPoolExecutor() as pool, service.engine.closed():
            held = pool.submit(service.output, hidden_states=hidden, adapter=name)
            assert service.engine.waiting.wait(10)
            assert service.metric("moelet_adapter_in_flight", adapter=name) == 1
            busy = service.client.delete(f"/v1/adapters/{name}", params={"timeout_s": 0.05})
            assert_error(busy, 409, "1 request still holds it")
            assert [(r["in_flight"], r["version"]) for r in service.records()] == [(1, 1)]
            going = pool.submit(service.client.delete, f"/v1/adapters/{name}")
            while service.forward(hidden_states=[], adapter=name).status_code == 200:
                threading.Event().wait(0.01)
            assert not going.done()
            service.engine.gate.set()
            assert torch.equal(held.result(), expected)
            assert going.result().status_code == 200
        assert service.records() == []

    def test_a_request_is_served_by_the_version_of_its_admission(self, service: RunningService, name: str) -> None:
        service.write("one", 1)
        service.write("two", 2)
        hidden = hidden_states(2)
        service.load(name, "one")
        old = service.output(hidden_states=hidden, adapter=name)
        with ThreadPoolExecutor() as pool, service.engine.closed():
            first = pool.submit(service.forward, hidden_states=hidden, adapter=name)
            assert service.engine.waiting.wait(10)
            queued = pool.submit(service.forward, hidden_states=hidden, adapter=name)
            while service.metric("moelet_adapter_in_flight", adapter=name) < 2:
                threading.Event().wait(0.01)
            assert service.metric("moelet_queue_requests") == 1
            assert service.metric("moelet_queue_tokens") == 2
            assert service.load(name, "two", load_inplace=True).status_code == 200
            late = pool.submit(service.forward, hidden_states=hidden, adapter=name)
            service.engine.gate.set()
            answers = [answer.result().json() for answer in (first, queued, late)]
        assert [a["adapter_versions"][name] for a in answers] == [1, 1, 2]
        outputs = [torch.tensor(a["hidden_states"]) for a in answers]
        assert torch.equal(outputs[0], old)
        assert torch.equal(outputs[1], old)
        assert not torch.equal(outputs[2], old)

    def test_swaps_under_concurrent_calls(self, service: RunningService) -> None:
        """Every answer equals what the version that it names gives."""
        hidden = hidden_states(4)
        by_seed = []
        for seed in (1, 2):
            service.load(f"fixed{seed}", service.write(f"fixed{seed}", seed))
            by_seed.append(service.output(hidden_states=hidden, adapter=f"fixed{seed}"))
        service.load("hot", "fixed1")
        first_version = service.records()[-1]["version"]
        stop = threading.Event()

        def call() -> int:
            answered = 0
            while not stop.is_set() or not answered:
                answer = service.forward(hidden_states=hidden, adapter="hot").json()
                version = answer["adapter_versions"]["hot"]
                expected = by_seed[(version - first_version) % 2]
                assert torch.equal(torch.tensor(answer["hidden_states"]), expected), version
                answered += 1
            return answered

        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(call) for _ in range(4)]
            try:
                for i in range(1, 16):
                    path = f"fixed{i % 2 + 1}"
                    assert service.load("hot", path, load_inplace=True).status_code == 200
            finally:
                stop.set()
            assert sum(c.result() for c in calls) >= 4
        assert [r["in_flight"] for r in service.records()] == [0, 0, 0]
        assert service.service.adapters.table.retired == ()

    def test_concurrent_loads_of_one_name_come_one_after_the_other(self, service: RunningService, name: str) -> None:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: service.load(name, "good"), range(8)))
            assert sorted(a.status_code for a in answers) == [200] + [400] * 7
            puts = list(pool.map(lambda _: service.client.put(f"/v1/adapters/{name}", json={"path": "good"}), range(8)))
        assert sorted(p.json()["version"] for p in puts) == list(range(2, 10))

    def test_the_least_recently_used_makes_room(self, service: RunningService) -> None:
        names = [f"n{i}" for i in range(6)]
        for name in names:
            service.load(name, "good", pinned=name == "n0")
        service.output(hidden_states=hidden_states(1), adapter="n1")
        assert service.load("new", "good").status_code == 200
        assert sorted(r["name"] for r in service.records()) == ["n0", "n1", "n3", "n4", "n5", "new"]
        assert_error(service.forward(hidden_states=hidden_states(1), adapter="n2"), 404, "evicted")

    def test_too_many_pins(self, service: RunningService) -> None:
        for i in range(2):
            assert service.load(f"p{i}", "good", pinned=True).status_code == 200
        before = service.records()
        assert_error(service.load("p2", "good", pinned=True), 409, "pinned")
        assert service.records() == before

    # the rest

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
        "path", ["/", "/v1", "/v1/models/", "/v1/layers/1", "/v2", "/nothing?x=1", "/v1/adapters/a/b"]
    )
    def test_unknown_path(self, service: RunningService, path: str) -> None:
        assert_error(service.client.get(path), 404, path.partition("?")[0])

    def test_method_not_allowed(self, service: RunningService) -> None:
        refused = service.client.get("/v1/layers/1/forward")
        assert_error(refused, 405, "GET")
        assert refused.headers["allow"] == "POST"
        assert_error(service.client.patch("/v1/adapters/a"), 405, "PATCH")

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
                service.metric("moelet_tokens_total", layer="1"),
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
        } <= routes
        text = json.dumps(document)
        for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
            assert name in document["components"]["schemas"]
        assert "422" not in text
