"""The HTTP contract of forwards, for any engine."""

import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from contract_terms import ContractFixtures, assert_error
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import EngineError
from oracle import assert_layer_close_to_truth
from running_service import (
    EXPERTS,
    HIDDEN,
    MAX_BODY_BYTES,
    TOP_K,
    RunningService,
    hidden_states,
)

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

BAD_BODIES = [
    *(b"", b"{", b"[]", b"3", b'"text"', b"null", b"\xff{}", b"[" * 5000),
    b'{"hidden_states": [[NaN}',
    b'{"hidden_states": [[NaN]], "\\ud800": 0}',
]


class ForwardContract(ContractFixtures):
    """Answers, adapters of tokens, and refusals of ``POST /v1/layers/{layer}/forward``."""

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
        assert answer.status_code == 200, answer.text
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

    def test_requests_computed_together_give_the_bits_of_each_alone(self, service: RunningService) -> None:
        """Of sizes around a batch's, with several adapters each, while the engine is kept from starting."""
        names = [f"s{i}" for i in range(4)]
        for i, name in enumerate(names):
            service.load(name, service.write(name, 10 + i))
        sizes = (1, 3, service.service.engine.batch_tokens + 2, 1, 2, 5, 1, 1)
        choices = [*names, None]
        bodies = [
            {
                "hidden_states": hidden_states(size, seed=i),
                "adapters": [choices[(i + t) % len(choices)] for t in range(size)],
            }
            for i, size in enumerate(sizes)
        ]
        alone = [service.output(**body) for body in bodies]
        before = service.engine.forwards
        with ThreadPoolExecutor(len(bodies)) as pool:
            with service.engine.closed():
                together = [pool.submit(service.output, **body) for body in bodies]
                while service.service.lifecycle.in_flight < len(bodies):
                    threading.Event().wait(0.01)
            for expected, output in zip(alone, together, strict=True):
                assert torch.equal(output.result(), expected)
        assert service.engine.forwards - before < 2 * len(bodies)

    @pytest.mark.parametrize("sent", ["soon", "-1", "0", "1e3"])
    def test_timeout_that_is_no_number(self, service: RunningService, sent: str) -> None:
        refused = service.forward(hidden_states=hidden_states(1), headers={"X-Request-Timeout-Ms": sent})
        assert_error(refused, 400, "milliseconds", param="X-Request-Timeout-Ms")

    def test_a_request_past_its_timeout_is_not_computed(self, service: RunningService, name: str) -> None:
        service.load(name, "good")
        hidden = hidden_states(2)
        with ThreadPoolExecutor() as pool, service.engine.closed():
            running = [pool.submit(service.output, hidden_states=hidden)]
            assert service.engine.waiting.wait(10)
            late = service.forward(hidden_states=hidden, adapter=name, headers={"X-Request-Timeout-Ms": "50"})
            assert_error(late, 504, "within its 50 ms")
            assert service.records()[0]["in_flight"] == 0
        assert running[0].result().shape == hidden.shape
        assert service.forward(hidden_states=hidden, headers={"X-Request-Timeout-Ms": "30000"}).status_code == 200

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

    @pytest.mark.parametrize("path", ["/v1/layers/1/forward", "/v1/load_lora_adapter"])
    def test_bodies_may_be_compressed(self, service: RunningService, path: str) -> None:
        body = {"hidden_states": HIDDEN_2} if "forward" in path else {"lora_name": "a", "lora_path": "good"}

        def post(content: bytes, coding: str = "gzip") -> httpx.Response:
            return service.client.post(path, content=content, headers={"Content-Encoding": coding})

        assert post(gzip.compress(json.dumps(body).encode())).status_code == 200
        service.unload_all()
        assert post(json.dumps(body).encode(), "").status_code == 200
        assert_error(post(gzip.compress(b" " * (MAX_BODY_BYTES + 1))), 413, "1 MiB")
        assert_error(post(b"{}"), 400, "gzip")
        assert_error(post(b"{}", "br"), 415, "gzip or deflate", "br")

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
