"""The HTTP contract of adapters that change while requests run, for any engine."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from contract_terms import ContractFixtures, assert_error
from eventually import eventually
from running_service import (
    RunningService,
    hidden_states,
)


class SwapContract(ContractFixtures):
    """Versions, waiting unloads, and swaps under concurrent calls."""

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
            impatient = service.client.delete(f"/v1/adapters/{name}", params={"timeout_s": 0.05})
            assert_error(impatient, 409, "another request", "1 request still holds it")
            service.engine.gate.set()
            assert torch.equal(held.result(), expected)
            assert going.result().status_code == 200
        assert service.records() == []

    def test_an_adapter_that_is_being_unloaded_is_nowhere_told_to_be_there(
        self, service: RunningService, name: str
    ) -> None:
        """What forwards that name it are told, every listing says; after an unload that gave up all is as before."""
        for each in ("kept", name):
            service.load(each, "good")
        hidden = hidden_states(2)

        def told() -> list[object]:
            """The status of a forward and of two readinesses, what vLLM's list has, and the repository's states."""
            version = service.service.adapters.table.current(name).version
            paths = (f"/v2/models/{name}/ready", f"/v2/models/{name}/versions/{version}/ready", f"/v2/models/{name}")
            statuses = [service.client.get(path).status_code for path in paths]
            listed = service.client.get("/v1/models").json()["data"]
            states = service.client.post("/v2/repository/index").json()
            ready = service.client.post("/v2/repository/index", json={"ready": True}).json()
            assert ready == [item for item in states if item["state"] == "READY"]
            return [
                service.forward(hidden_states=[], adapter=name).status_code,
                statuses,
                [model["id"] for model in listed[1:]],
                [(item["state"], item["reason"]) for item in states if item["name"] == name],
                service.metric("moelet_adapters_loaded"),
            ]

        there = [200, [200] * 3, sorted(["kept", name]), [("READY", "")], 2]
        going = [404, [404] * 3, ["kept"], [("UNAVAILABLE", "it is being unloaded")], 1]
        path = f"/v1/adapters/{name}"
        with ThreadPoolExecutor() as pool, service.engine.closed():
            held = pool.submit(service.output, hidden_states=hidden, adapter=name)
            assert service.engine.waiting.wait(10)
            assert service.client.delete(path, params={"timeout_s": 0.05}).status_code == 409
            assert told() == there
            unload = pool.submit(service.client.delete, path)
            eventually(lambda: service.service.adapters.table.current(name).draining)
            assert told() == going
            refused = service.forward(hidden_states=hidden, adapter=name).json()["error"]["message"]
            assert service.client.get(f"/v2/models/{name}/ready").json() == {"error": refused}
            assert service.client.post(f"/v2/models/{name}/infer").json() == {"error": refused}
            assert service.client.get(path).json()["in_flight"] == 1, "its record says what it waits for"
            service.engine.gate.set()
            assert unload.result().status_code == 200
            held.result()
        assert [model["id"] for model in service.client.get("/v1/models").json()["data"]] == ["small", "kept"]
        assert name not in service.client.post("/v2/repository/index").text

    def test_a_request_is_served_by_the_version_of_its_admission(self, service: RunningService, name: str) -> None:
        service.write("one", 1)
        service.write("two", 2)
        hidden = hidden_states(2)
        service.load(name, "one")
        old = service.output(hidden_states=hidden, adapter=name)
        with ThreadPoolExecutor() as pool, service.engine.closed():
            depth = service.service.engine.depth
            early = []
            for waiting in range(depth + 1):
                early.append(pool.submit(service.forward, hidden_states=hidden, adapter=name))
                while service.metric("moelet_adapter_in_flight", adapter=name) <= waiting:
                    threading.Event().wait(0.01)
            assert service.engine.waiting.wait(10)
            assert service.metric("moelet_queue_requests") == 1
            assert service.metric("moelet_queue_tokens") == 2
            assert service.load(name, "two", load_inplace=True).status_code == 200
            late = pool.submit(service.forward, hidden_states=hidden, adapter=name)
            service.engine.gate.set()
            *old_answers, new_answer = [answer.result().json() for answer in (*early, late)]
        assert [a["adapter_versions"][name] for a in (*old_answers, new_answer)] == [1] * (depth + 1) + [2]
        assert all(torch.equal(torch.tensor(a["hidden_states"]), old) for a in old_answers)
        assert not torch.equal(torch.tensor(new_answer["hidden_states"]), old)

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
