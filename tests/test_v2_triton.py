"""Triton's own HTTP client, unchanged, against the service: every call that it makes of what is served."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from running_service import EXPERTS, HIDDEN, TOP_K, RunningService, hidden_states
from source_tree import ROOT

OLD_CLIENT = "MOELET_TEST_OLD_TRITONCLIENT"
"""A folder with tritonclient before 2.70, which has no ml_dtypes: ``pip install --no-deps --target FOLDER``."""


@pytest.fixture
def service(running_service: RunningService) -> Iterator[RunningService]:
    yield running_service
    running_service.unload_all()


def address(service: RunningService) -> str:
    return f"{service.client.base_url.host}:{service.client.base_url.port}"


@pytest.fixture
def client(service: RunningService) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(service)) as client:
        yield client


def tensor(name: str, value: np.ndarray[Any, Any], datatype: str, *, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value, binary_data=binary)
    return made


def hidden_input(hidden: torch.Tensor, datatype: str = "BF16", *, binary: bool = True) -> triton.InferInput:
    numpy = {"BF16": ml_dtypes.bfloat16, "FP16": np.float16, "FP32": np.float32}[datatype]
    return tensor("hidden_states", hidden.numpy().astype(numpy), datatype, binary=binary)


def values(result: triton.InferResult) -> torch.Tensor:
    return torch.from_numpy(result.as_numpy("hidden_states").astype(np.float32))


def test_server_and_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("layers.1")
    assert client.is_model_ready("layers.3", "1")
    assert not client.is_model_ready("layers.2")
    assert not client.is_model_ready("layers.1", "2")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", "model_repository", "parameters"]
    told = client.get_model_metadata("layers.1")
    assert [item["name"] for item in told["outputs"]] == ["hidden_states"]
    with pytest.raises(InferenceServerException, match=r"\[404\] layer 2 is not served: it was left out"):
        client.get_model_metadata("layers.2")


@pytest.mark.parametrize("datatype", ["BF16", "FP16", "FP32"])
def test_binary_inference(service: RunningService, client: triton.InferenceServerClient, datatype: str) -> None:
    hidden = hidden_states(3).half().float() if datatype == "FP16" else hidden_states(3)
    result = client.infer("layers.1", [hidden_input(hidden, datatype)], request_id="mine")
    assert result.as_numpy("hidden_states").dtype == ml_dtypes.bfloat16
    assert torch.equal(values(result), service.output(hidden_states=hidden))
    assert result.get_response()["id"] == "mine"
    assert result.get_response()["parameters"] == {"adapter_versions": "{}"}


def test_json_inference(service: RunningService, client: triton.InferenceServerClient) -> None:
    hidden = hidden_states(2)
    outputs = [triton.InferRequestedOutput("hidden_states", binary_data=False)]
    result = client.infer("layers.1", [hidden_input(hidden, "FP32", binary=False)], outputs=outputs)
    assert result.as_numpy("hidden_states").dtype == np.float32
    assert torch.equal(values(result), service.output(hidden_states=hidden))
    outputs = [triton.InferRequestedOutput("hidden_states", binary_data=True)]
    parameters = {"output_datatype": "FP32"}
    result = client.infer("layers.1", [hidden_input(hidden)], outputs=outputs, parameters=parameters)
    assert result.as_numpy("hidden_states").dtype == np.float32
    assert torch.equal(values(result), service.output(hidden_states=hidden))


@pytest.mark.parametrize("binary", [True, False])
def test_routing_and_adapters(service: RunningService, client: triton.InferenceServerClient, binary: bool) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        client.load_model(name, config=json.dumps({"lora_path": service.write(f"triton-{name}", seed)}))
    hidden, ids, weights = hidden_states(4), torch.randint(EXPERTS, (4, TOP_K)), torch.rand(4, TOP_K)
    names = ["a", "", "b", "a"]
    inputs = [
        hidden_input(hidden),
        tensor("topk_ids", ids.numpy().astype(np.int32), "INT32", binary=binary),
        tensor("topk_weights", weights.numpy(), "FP32", binary=binary),
        tensor("adapter", np.array([name.encode() for name in names], dtype=np.object_), "BYTES", binary=binary),
    ]
    result = client.infer("layers.1", inputs)
    adapters = [name or None for name in names]
    expected = service.output(hidden_states=hidden, topk_ids=ids, topk_weights=weights, adapters=adapters)
    assert torch.equal(values(result), expected)
    assert json.loads(result.get_response()["parameters"]["adapter_versions"]).keys() == {"a", "b"}
    result = client.infer("layers.1", inputs[:3], parameters={"adapter": "b"}, timeout=30_000_000, priority=1)
    named = service.output(hidden_states=hidden, topk_ids=ids, topk_weights=weights, adapter="b")
    assert torch.equal(values(result), named)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression(service: RunningService, client: triton.InferenceServerClient, coding: str) -> None:
    hidden = hidden_states(600)
    codings = {"request_compression_algorithm": coding, "response_compression_algorithm": coding}
    assert torch.equal(
        values(client.infer("layers.1", [hidden_input(hidden)], **codings)),
        values(client.infer("layers.1", [hidden_input(hidden)])),
    )
    result = client.infer("layers.1", [hidden_input(hidden[:2], "FP32", binary=False)], **codings)
    assert torch.equal(values(result), service.output(hidden_states=hidden[:2]))


def test_no_tokens(client: triton.InferenceServerClient) -> None:
    result = client.infer("layers.1", [hidden_input(hidden_states(0))])
    assert result.as_numpy("hidden_states").shape == (0, HIDDEN)
    client.load_model("a", config=json.dumps({"lora_path": "good"}))
    result = client.infer("layers.1", [hidden_input(hidden_states(0))], parameters={"adapter": "a"})
    assert json.loads(result.get_response()["parameters"]["adapter_versions"]).keys() == {"a"}


def test_errors_reach_the_caller(client: triton.InferenceServerClient) -> None:
    for layer, sent, parameters, words in (
        ("layers.9", hidden_states(1), {}, r"\[404\] .*layer 9"),
        ("layers.1", hidden_states(1)[:, :-1], {}, rf"\[400\] hidden_states should have the shape \[T, {HIDDEN}\]"),
        ("layers.1", hidden_states(1), {"adapter": "x"}, r"\[404\] .*'x'"),
        ("layers.1", hidden_states(1), {"adpater": "x"}, r"\[400\] unknown parameter 'adpater'"),
        ("layers.1", hidden_states(1).repeat(12_000, 1), {}, r"\[413\] .*1 MiB"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            client.infer(layer, [hidden_input(sent)], parameters=parameters)


def test_repository(client: triton.InferenceServerClient) -> None:
    config = json.dumps({"lora_path": "good"})
    assert not client.is_model_ready("tuned")
    client.load_model("tuned", config=config)
    assert client.is_model_ready("tuned")
    client.load_model("tuned", config=config)
    listed = {item["name"]: (item["version"], item["state"]) for item in client.get_model_repository_index()}
    assert listed == {"layers.1": ("1", "READY"), "layers.3": ("1", "READY"), "tuned": ("2", "READY")}
    client.unload_model("tuned")
    assert not client.is_model_ready("tuned")
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("tuned")
    with pytest.raises(InferenceServerException, match="404"):
        client.unload_model("tuned")
    with pytest.raises(InferenceServerException, match="file:"):
        client.load_model("tuned", config=config, files={"file:x": b"x"})


def test_the_example_of_the_documentation(
    service: RunningService, client: triton.InferenceServerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "v2.md").read_text(encoding="utf-8")
    example = text.split("```python\n")[1].split("```")[0]
    # the address last: a port may have any digits
    for written, tried in (("64", str(HIDDEN)), ("layers.0", "layers.1"), ("localhost:8000", address(service))):
        assert written in example
        example = example.replace(written, tried)
    client.load_model("demo-a", config=json.dumps({"lora_path": "good"}))
    exec(compile(example, "docs/v2.md", "exec"), {})
    assert capsys.readouterr().out.rstrip().endswith("{'demo-a': 1}")


OLD = """
import json, sys
import numpy as np
import tritonclient.http as triton
from importlib.metadata import version
client = triton.InferenceServerClient(sys.argv[1])
hidden = np.array(json.loads(sys.stdin.read()), np.float32)
given = triton.InferInput("hidden_states", list(hidden.shape), "BF16")
given.set_data_from_numpy(hidden)
found = client.infer("layers.1", [given], request_compression_algorithm="gzip").as_numpy("hidden_states")
assert found.dtype == np.float32
print(json.dumps([version('tritonclient'), found.tolist()]))
client.close()
"""


@pytest.mark.skipif(OLD_CLIENT not in os.environ, reason=f"{OLD_CLIENT} names no folder with an old client")
def test_a_client_that_takes_bf16_as_float32(service: RunningService, tmp_path: Path) -> None:
    hidden = hidden_states(3)
    ran = subprocess.run(
        [sys.executable, "-c", OLD, address(service)],
        input=json.dumps(hidden.tolist()),
        env=os.environ | {"PYTHONPATH": os.environ[OLD_CLIENT]},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    version, found = json.loads(ran.stdout)
    assert version < "2.70"
    assert torch.equal(torch.tensor(found), service.output(hidden_states=hidden))
