"""Copies of models whose experts are remote: they share the client and nothing else; and that nothing is pickled."""

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moelet.layer.demo import DemoPaths, write_demo
from moelet.service.client import Client, RemoteExperts, ServiceUnreachableError
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from running_service import listening

TEXT = torch.tensor([[2, 3, 5, 7]])
Served = tuple[Client, DemoPaths]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A client of a service of the demo with its adapters ``demo-a`` and ``demo-b``, and its checkpoint."""
    demo = write_demo(tmp_path_factory.mktemp("demo") / "moelet-demo")
    adapters: Any = {"adapter": list(demo.adapters.items())}
    settings = Settings.read(checkpoint=demo.checkpoint, device="cpu", **adapters)
    with listening(open_service(settings)) as url, Client(url, "secret-key") as client:
        yield client, demo


def local_model(checkpoint: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    found: Tensor = model(TEXT).logits
    return found


def test_a_copy_of_the_model_calls_the_same_service(served: Served) -> None:
    client, demo = served
    remote = RemoteExperts.attach(local_model(demo.checkpoint), client, "demo-a")
    copied = copy.deepcopy(remote.model)
    wanted = logits(remote.model)
    assert torch.equal(logits(copied), wanted)
    remote.adapter = "demo-b"
    assert not torch.equal(logits(remote.model), wanted)
    assert torch.equal(logits(copied), wanted)
    copied.lm_head.weight.data.zero_()
    assert logits(remote.model).abs().sum() > 0
    remote.detach()
    assert not logits(copied).any()
    assert torch.equal(logits(remote.model), logits(local_model(demo.checkpoint)))


def test_a_copy_with_its_handle_is_changed_by_itself(served: Served) -> None:
    client, demo = served
    remote = RemoteExperts.attach(local_model(demo.checkpoint), client, "demo-a", timeout_s=20)
    base, with_a = logits(local_model(demo.checkpoint)), logits(remote.model)
    copied = copy.deepcopy(remote)
    assert (copied.layers, copied.adapter, copied.client) == (remote.layers, "demo-a", client)
    assert torch.equal(logits(copied.model), with_a)
    copied.adapter = "demo-b"
    with_b = logits(copied.model)
    assert (remote.adapter, list(copied.adapter_versions)) == ("demo-a", ["demo-b"])
    assert torch.equal(logits(remote.model), with_a)
    assert list(remote.adapter_versions) == ["demo-a"]
    copied.detach()
    assert torch.equal(logits(copied.model), base)
    assert torch.equal(logits(remote.model), with_a)
    assert not torch.equal(with_a, with_b)
    remote.detach()
    assert torch.equal(logits(remote.model), base)


def test_the_end_of_a_copy_leaves_the_client_open_and_that_of_the_client_ends_both(served: Served) -> None:
    client, demo = served
    with RemoteExperts.attach(local_model(demo.checkpoint), client.url) as remote:
        copied, model = copy.deepcopy(remote), copy.deepcopy(remote.model)
        copied.close()
        assert torch.equal(logits(model), logits(remote.model))
    with pytest.raises(ServiceUnreachableError, match=r"the client of http.* is closed"):
        logits(model)
    loaded = RemoteExperts.load(demo.checkpoint, client, dtype=torch.float32)
    assert torch.equal(logits(copy.deepcopy(loaded).model), logits(loaded.model))


def test_a_copy_of_a_client_is_the_client(served: Served) -> None:
    client, _ = served
    assert copy.copy(client) is client
    assert copy.deepcopy({"client": client})["client"] is client


def test_neither_a_client_nor_what_holds_one_is_pickled(served: Served) -> None:
    client, demo = served
    with RemoteExperts.attach(local_model(demo.checkpoint), client) as remote:
        for whole in (client, remote, remote.model):
            for dump in (lambda each, file: pickle.dump(each, file), torch.save):
                file = io.BytesIO()
                with pytest.raises(TypeError, match="a Client cannot be pickled, and neither can a model") as refused:
                    dump(whole, file)
                assert b"secret-key" not in file.getvalue()
                assert "secret-key" not in str(refused.value)
        torch.save(remote.model.state_dict(), io.BytesIO())
