"""Every family's MoE blocks with their experts in the service, against what transformers computes at home."""

import copy
import functools
import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from checkpoints import FAMILY_CONFIGS, HIDDEN, build_model, copy_checkpoint, moe_block, router_of, write_checkpoint
from moelet.layer.checkpoint import open_checkpoint
from moelet.layer.engine import LayerBatch
from moelet.layer.errors import UnsupportedCheckpointError
from moelet.layer.families import FAMILIES
from moelet.service.client import Client, RemoteExperts, RemoteExpertsError, remote_modules
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from oracle import assert_close_to_truth, torch_bf16_layer
from running_service import listening

TEXT = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(2))


@contextmanager
def serving(checkpoint: Path, layers: str | None = None) -> Iterator[str]:
    settings = Settings.read(checkpoint=checkpoint, device="cpu", layers=layers)
    with listening(open_service(settings)) as url:
        yield url


@torch.no_grad()
def check_blocks(model: PreTrainedModel, remote: PreTrainedModel, checkpoint: Path) -> None:
    """Each remote block against the local one in float64, over two sequences."""
    opened = open_checkpoint(checkpoint)
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    for index, spec in opened.model.layers.items():
        block = moe_block(model, index).double()
        truth = block(hidden.double())
        _, weights, ids = router_of(block)(hidden.double().flatten(0, 1))
        batch = LayerBatch(
            layer=index,
            hidden_states=hidden.flatten(0, 1),
            topk_ids=ids.int(),
            topk_weights=weights.float(),
        )
        baseline = torch_bf16_layer(spec, opened.load_layer(index), batch)
        value = moe_block(remote, index)(hidden.float())
        assert (value.shape, value.dtype) == (truth.shape, torch.float32)
        assert_close_to_truth(value.flatten(0, 1), truth.flatten(0, 1), baseline)


@pytest.mark.parametrize("model_type", FAMILY_CONFIGS)
def test_blocks_of_every_family(model_type: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / model_type
    model = write_checkpoint(checkpoint, model_type)
    with serving(checkpoint) as url, Client(url) as client, torch.no_grad():
        attached = copy.deepcopy(model).float()
        with RemoteExperts.attach(attached, client) as remote:
            check_blocks(model, attached, checkpoint)
            wanted = attached(TEXT, use_cache=False).logits
            at_home = {name for name, _ in attached.named_parameters()}
            logits = attached(TEXT, use_cache=False, output_router_logits=True).router_logits
            assert len(logits) == len(remote.layers)
        again = RemoteExperts.load(checkpoint, client, dtype=torch.float32)
        assert type(again.model) is type(model)
        assert {name for name, _ in again.model.named_parameters()} == at_home
        assert torch.equal(again.model(TEXT, use_cache=False).logits, wanted)
        with pytest.raises(RemoteExpertsError, match="released or never loaded"):
            again.detach()


def test_kimi_k2_as_the_deepseek_v3_that_it_is(tmp_path: Path) -> None:
    """With the code of its own that its config.json names, which is neither asked for nor run."""
    model = write_checkpoint(tmp_path / "v3", "deepseek_v3")
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model"}
    kimi = copy_checkpoint(tmp_path / "v3", tmp_path / "kimi", {"model_type": "kimi_k2", "auto_map": code})
    with serving(kimi) as url, torch.no_grad():
        with RemoteExperts.attach(copy.deepcopy(model).float(), url) as remote:
            check_blocks(model, remote.model, kimi)
            wanted = remote.model(TEXT).logits
        with RemoteExperts.load(kimi, url, dtype=torch.float32, use_cache=False) as loaded:
            assert type(loaded.model) is type(model)
            assert (loaded.model.config.model_type, loaded.model.config.use_cache) == ("deepseek_v3", False)
            assert torch.equal(loaded.model(TEXT).logits, wanted)
        with RemoteExperts.load(kimi, url, layers=[1], dtype=torch.bfloat16) as half:
            kept, experts = (moe_block(each, 2).experts.state_dict() for each in (half.model, model))
            assert {"gate_up_proj", "down_proj"} <= kept.keys()
            assert all(torch.equal(kept[name], experts[name]) for name in experts)


def test_every_family_that_is_served_is_loaded(tmp_path: Path) -> None:
    """Here those of which there is no test above: a text model alone, and a config.json that names no class."""
    assert set(FAMILIES) == {*FAMILY_CONFIGS, "kimi_k2", "qwen3_5_moe_text"}
    composite = write_checkpoint(tmp_path / "composite", "qwen3_5_moe")
    text = transformers.Qwen3_5MoeForCausalLM(composite.config.text_config)
    text.model.load_state_dict(composite.model.language_model.state_dict())
    text.save_pretrained(tmp_path / "text")
    write_checkpoint(tmp_path / "olmoe", "olmoe")
    bare = copy_checkpoint(tmp_path / "olmoe", tmp_path / "bare", {"architectures": None})
    for checkpoint, kind in ((tmp_path / "text", type(text)), (bare, transformers.OlmoeForCausalLM)):
        model = kind.from_pretrained(checkpoint, dtype=torch.bfloat16, experts_implementation="eager")
        with serving(checkpoint) as url, RemoteExperts.load(checkpoint, url, dtype=torch.float32) as remote:
            assert type(remote.model) is kind
            check_blocks(model, remote.model, checkpoint)


def test_a_family_that_is_not_served_is_not_loaded(qwen: tuple[str, Path], tmp_path: Path) -> None:
    for model_type in ("gpt_oss", "never_heard_of"):
        other = copy_checkpoint(qwen[1], tmp_path / model_type, {"model_type": model_type})
        with pytest.raises(UnsupportedCheckpointError, match=f"model_type {model_type} .* is not supported"):
            RemoteExperts.load(other, qwen[0])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A service of layers 0 and 2 of three, and its checkpoint."""
    checkpoint = tmp_path_factory.mktemp("qwen") / "base"
    write_checkpoint(checkpoint, "qwen3_moe")
    with serving(checkpoint, "0,2") as url:
        yield url, checkpoint


def test_a_layer_that_is_not_served(qwen: tuple[str, Path]) -> None:
    model = build_model("qwen3_moe")
    with pytest.raises(RemoteExpertsError, match=r"layer 1 of the model is not served: it was left out .* are 0,2"):
        RemoteExperts.attach(model, qwen[0])
    assert all(hasattr(moe_block(model, layer).experts, "gate_up_proj") for layer in range(3))
    with RemoteExperts.attach(model, qwen[0], layers=[2, 0]) as remote:
        assert remote.layers == (0, 2)
    loaded = RemoteExperts.load(qwen[1], qwen[0], layers=[0, 2])
    assert hasattr(moe_block(loaded.model, 1).experts, "gate_up_proj")
    assert not list(moe_block(loaded.model, 2).experts.parameters())
    loaded.close()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_experts": 4}, "layer 0 has num_experts 4 in the model, and 8 in the service, which serves base"),
        ({"moe_intermediate_size": 32}, "intermediate_size 32 in the model, and 24 in the service"),
        ({"num_experts_per_tok": 2}, "top_k 2 in the model, and 3 in the service"),
        ({"mlp_only_layers": [0, 1, 2]}, "Qwen3MoeForCausalLM has no MoE layer with a gate and experts"),
    ],
)
def test_a_model_of_other_sizes(qwen: tuple[str, Path], changes: dict[str, object], told: str) -> None:
    layers = None if "mlp_only_layers" in changes else [0]
    with pytest.raises(RemoteExpertsError, match=told):
        RemoteExperts.attach(build_model("qwen3_moe", **changes), qwen[0], layers=layers)


def test_models_that_cannot_have_remote_experts(qwen: tuple[str, Path]) -> None:
    url = qwen[0]
    with pytest.raises(RemoteExpertsError, match="layer 7 of the model is no MoE layer; those are 0-2"):
        RemoteExperts.attach(build_model("qwen3_moe"), url, layers=[7])
    with pytest.raises(RemoteExpertsError, match="intermediate_size"):
        RemoteExperts.attach(build_model("qwen2_moe"), url, layers=[0])
    for made, model in ((RemoteExperts.attach, build_model("qwen3_moe")), (RemoteExperts.load, qwen[1])):
        with pytest.raises(RemoteExpertsError, match=r"^layers is empty: name the layers to change, or leave it out"):
            made(model, url, layers=[])  # type: ignore[operator]
    gpt_oss = AutoModelForCausalLM.from_config(
        GptOssConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_local_experts=2, vocab_size=8)
    )
    with pytest.raises(UnsupportedCheckpointError, match=r"gpt_oss .*its router and experts have biases"):
        RemoteExperts.attach(gpt_oss, url)
    listed = build_model("qwen3_moe")
    moe_block(listed, 0).experts = nn.ModuleList()
    with pytest.raises(RemoteExpertsError, match="are a list of modules"):
        RemoteExperts.attach(listed, url, layers=[0])
    with RemoteExperts.attach(listed, url, layers=[2]), pytest.raises(RemoteExpertsError, match="remote already"):
        RemoteExperts.attach(listed, url, layers=[2])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_local_adapter_stays_where_the_service_does_not_reach(qwen: tuple[str, Path]) -> None:
    outside = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    with RemoteExperts.attach(get_peft_model(build_model("qwen3_moe"), outside), qwen[0], layers=[0]) as remote:
        assert remote.layers == (0,)
    inside = LoraConfig(target_modules=[], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(RemoteExpertsError, match=r"layer 0 carry a local adapter \(.*lora_A.*load it into the service"):
        RemoteExperts.attach(get_peft_model(build_model("qwen3_moe"), inside), qwen[0], layers=[0])


def test_released_experts_are_gone_and_loaded_models_never_had_them(qwen: tuple[str, Path], tmp_path: Path) -> None:
    url, checkpoint = qwen
    model = build_model("qwen3_moe")
    local = weakref.ref(moe_block(model, 0).experts.gate_up_proj)
    with RemoteExperts.attach(model, url, layers=[0]) as remote:
        assert local() is not None
        remote.release()
        gc.collect()
        assert local() is None
        with pytest.raises(RemoteExpertsError, match="released or never loaded"):
            remote.detach()

    forgetful = build_model("qwen3_moe")
    local = weakref.ref(moe_block(forgetful, 0).experts.gate_up_proj)
    with Client(url) as client, torch.no_grad():
        RemoteExperts.attach(forgetful, client, layers=[0])
        gc.collect()
        assert local() is None
        assert forgetful(TEXT).logits.isfinite().all()

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if re.search(r"layers\.[02]\.mlp\.experts", key)]:
            del tensors[key]

    rest = copy_checkpoint(checkpoint, tmp_path / "rest", tensors=drop)
    load = functools.partial(RemoteExperts.load, url=url, layers=[0, 2])
    with load(rest) as partial, load(checkpoint) as whole, torch.no_grad():
        assert torch.equal(partial.model(TEXT).logits, whole.model(TEXT).logits)


def test_a_long_prompt_goes_in_several_calls(qwen: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(client: Client, layer: int, hidden: torch.Tensor, **routing: Any) -> Any:
        calls.append((layer, len(hidden)))
        return answer(client, layer, hidden, **routing)

    answer = Client.answer
    monkeypatch.setattr(Client, "answer", counted)
    with RemoteExperts.attach(build_model("qwen3_moe").float(), qwen[0], layers=[0]) as remote, torch.no_grad():
        whole = remote.model(TEXT).logits
        monkeypatch.setattr(remote_modules, "MOST_BYTES", 6 * 2 * HIDDEN)
        assert torch.equal(remote.model(TEXT).logits, whole)
    assert calls == [(0, 14), (0, 6), (0, 6), (0, 2)]


def test_gradients_end_with_an_error_and_not_in_silence(qwen: tuple[str, Path]) -> None:
    with RemoteExperts.attach(build_model("qwen3_moe").float(), qwen[0], layers=[0, 2]) as remote:
        loss = remote.model(TEXT).logits.sum()
        with pytest.raises(RemoteExpertsError, match=r"layer 2 .* gives no gradients"):
            loss.backward()
