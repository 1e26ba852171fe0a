"""The HTTP contract of loading, listing and unloading adapters, for any engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract_terms import ContractFixtures, assert_error
from running_service import (
    OpenEngine,
    RunningService,
    hidden_states,
    random_adapter,
    running,
    write_adapter,
)

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


class AdapterContract(ContractFixtures):
    """Records, refusals that change nothing, the path policy and eviction."""

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

    @pytest.mark.parametrize("body", [{}, {"path": 3}, {"path": None}, {"path": ""}, {"path": "a\0"}])
    def test_a_put_without_a_path_says_so(self, service: RunningService, body: dict[str, object]) -> None:
        assert_error(service.client.put("/v1/adapters/a", json=body), 400, "path", param="path")
        assert_error(service.client.put("/v1/adapters/a", content=b"[]"), 400, "the body", param=None)

    @pytest.mark.parametrize("name", ["a%20b", ".a", "a" * 129, "%ff"])
    def test_what_is_no_name_is_400_whatever_is_done_to_it(self, service: RunningService, name: str) -> None:
        path = f"/v1/adapters/{name}"
        for refused in (service.client.put(path, json={"path": "good"}), service.client.delete(path)):
            assert_error(refused, 400, "name must match", param="name")

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
