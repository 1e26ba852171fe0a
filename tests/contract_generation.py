"""Generation with remote experts as tests that any engine must pass: ``GenerationContract`` beside a ``generation``."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from checkpoints import LAYERS, build_model, moe_block
from moelet.service.client import Client, RemoteExperts, ServiceError
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from running_service import listening

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 4, 8
ROUNDINGS = 12
ENOUGH = 64
"""Of the tokens generated, how many must be far enough from a tie to be compared."""
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {"first": 1, "second": 2}
"""The adapters' folders, and their seeds."""


class Local:
    """A model whose experts run here in float32, and what it makes of the prompts greedily.

    ``tokens`` ``[PROMPTS, NEW_TOKENS]``, ``logits`` ``[PROMPTS, NEW_TOKENS, V]``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tokens, self.logits = generate(model)

    @torch.no_grad()
    def noise(self) -> Tensor:
        """How far the logits of each prompt move where the experts' outputs are rounded to bf16 in one way or another:
        far where that makes a router choose other experts."""
        text = torch.cat([prompts(), self.tokens], dim=1)
        moved = [continuation_logits(self._rounded(seed), text) - self.logits for seed in range(ROUNDINGS)]
        return torch.stack(moved).abs().amax((0, 2, 3))

    def _rounded(self, seed: int) -> PreTrainedModel:
        rounded = copy.deepcopy(self.model)
        for layer in range(LAYERS):
            block = moe_block(rounded, layer)
            block.experts = InBfloat16(block.experts, LAYERS * seed + layer)
        return rounded

    def apart(self) -> Tensor:
        """How far the two best logits of each token are apart, in terms of ``noise``."""
        best = self.logits.topk(2).values
        return (best[..., 0] - best[..., 1]) / self.noise()[:, None]

    def certain(self) -> Tensor:
        """Which tokens come before the first tie of their prompt: two best logits as close as bf16 may move them."""
        return (self.apart() > 2).int().cumprod(1).bool()


class InBfloat16(nn.Module):
    """Experts in bf16 inside of a float32 model, their output off by up to one more rounding, at random by ``seed``."""

    def __init__(self, experts: nn.Module, seed: int) -> None:
        super().__init__()
        self.experts = experts.bfloat16()
        self.seed = seed

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        output: Tensor = self.experts(hidden.bfloat16(), ids, weights.bfloat16()).float()
        seeded = torch.Generator().manual_seed(self.seed)
        return output * (1 + (2 * torch.rand(output.shape, generator=seeded) - 1) * torch.finfo(torch.bfloat16).eps)


def lessons() -> Tensor:
    """Prompts and what the base model is taught to make of them."""
    shape = PROMPTS, PROMPT_TOKENS + NEW_TOKENS
    return torch.randint(3, 64, shape, generator=torch.Generator().manual_seed(5))


def prompts() -> Tensor:
    return lessons()[:, :PROMPT_TOKENS]


def continuation_logits(model: nn.Module, text: Tensor) -> Tensor:
    """The logits that choose each new token of ``text``."""
    logits: Tensor = model(text).logits[:, PROMPT_TOKENS - 1 : -1]
    return logits


@torch.no_grad()
def generate(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The tokens that greedy generation adds to the prompts, and their logits."""
    made = model.generate(
        prompts(), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return made.sequences[:, PROMPT_TOKENS:], torch.stack(made.logits, dim=1).float()


def assert_same_tokens(model: PreTrainedModel, local: Local) -> None:
    """``model`` generates what ``local`` does, token by token, wherever that is certain."""
    tokens, _ = generate(model)
    certain = local.certain()
    wrong = certain & (tokens != local.tokens)
    assert not wrong.any(), f"{int(wrong.sum())} differ, first where logits are apart {local.apart()[wrong].tolist()}"
    assert certain.sum() >= ENOUGH, f"only {int(certain.sum())} tokens are certain: the test compares too little"


def taught_model() -> PreTrainedModel:
    """A small model that knows its lessons, so that few of its logits tie; bf16 values in float32."""
    model = build_model("qwen3_moe").float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    text = lessons()
    for _ in range(200):
        logits = continuation_logits(model, text)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, PROMPT_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    taught: PreTrainedModel = model.eval().requires_grad_(False).bfloat16().float()
    return taught


def with_adapter(model: PreTrainedModel, seed: int, folder: Path) -> PreTrainedModel:
    """``model`` with a random adapter on its experts merged by PEFT, which has saved it to ``folder``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=BOTH)
        wrapped = get_peft_model(copy.deepcopy(model), config)
        seeded = torch.Generator().manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=seeded) * parameter.shape[-1] ** -0.5
                parameter.data.copy_((0.7 * values).bfloat16())
        wrapped.save_pretrained(str(folder))
        merged: PreTrainedModel = wrapped.merge_and_unload()
    return merged


@dataclass
class GenerationService:
    """A service, the folder that holds its checkpoint and its adapters, and the same models here.

    ``local`` holds the base and each adapter merged into it, float32 outside and inside of the experts.
    """

    url: str
    folder: Path
    local: dict[str, Local]


@contextmanager
def generation_service(folder: Path, device: str) -> Iterator[GenerationService]:
    """A service over the engine of ``device``, and what its generations must equal."""
    base = taught_model()
    copy.deepcopy(base).bfloat16().save_pretrained(folder / "base")
    adapted = {name: with_adapter(base, seed, folder / name) for name, seed in ADAPTERS.items()}
    local = {name: Local(model) for name, model in ({"base": base} | adapted).items()}
    settings = Settings.read(checkpoint=folder / "base", adapter_root=[folder], device=device, max_lora_rank=8)
    with listening(open_service(settings)) as url:
        yield GenerationService(url, folder, local)


class GenerationContract:
    """A model with its experts in the service writes what it writes with its experts at home."""

    @pytest.fixture
    def client(self, generation: GenerationService) -> Iterator[Client]:
        """Leaves the service with no adapter."""
        with Client(generation.url) as client:
            yield client
            for record in client.adapters():
                client.unload_adapter(record["name"])

    @pytest.fixture
    def model(self, generation: GenerationService) -> PreTrainedModel:
        """The base model, which the test may change."""
        return copy.deepcopy(generation.local["base"].model)

    def test_base_and_adapters_swapped_between_generations(
        self, generation: GenerationService, client: Client, model: PreTrainedModel
    ) -> None:
        """One name, loaded and then replaced; and the base again at the end."""
        base = generation.local["base"]
        learnt = (base.tokens == lessons()[:, PROMPT_TOKENS:]).float().mean()
        assert learnt > 0.9, "training rounds differently from run to run, and may leave a token unlearnt"
        assert base.certain().float().mean() > 0.9
        with RemoteExperts.attach(model, generation.url) as remote:
            assert not any("experts" in name for name, _ in model.named_parameters())
            assert_same_tokens(model, base)
            assert remote.adapter_versions == {}
            for version, name in enumerate(ADAPTERS, 1):
                assert client.load_adapter("served", name, replace=version > 1)["version"] == version
                remote.adapter = "served"
                local = generation.local[name]
                assert_same_tokens(model, local)
                assert remote.adapter_versions == {"served": version}
                seen = local.certain() & (local.tokens != base.tokens)
                assert seen.any(1).sum() >= PROMPTS // 4, "the adapter changes too little to be seen"
            remote.adapter = None
            assert_same_tokens(model, base)

    def test_a_detached_model_is_as_it_was(self, generation: GenerationService, model: PreTrainedModel) -> None:
        base = generation.local["base"]
        remote = RemoteExperts.attach(model, generation.url, layers=[0, 2])
        assert [hasattr(moe_block(model, layer).experts, "gate_up_proj") for layer in range(3)] == [False, True, False]
        assert_same_tokens(model, base)
        remote.detach()
        assert torch.equal(generate(model)[1], base.logits)

    def test_a_model_loaded_without_experts(self, generation: GenerationService, client: Client) -> None:
        client.load_adapter("served", "first")
        with RemoteExperts.load(generation.folder / "base", client, adapter="served", dtype=torch.float32) as remote:
            assert_same_tokens(remote.model, generation.local["first"])

    def test_a_missing_adapter_ends_the_generation(self, client: Client, model: PreTrainedModel) -> None:
        with RemoteExperts.attach(model, client, "nowhere"), pytest.raises(ServiceError, match="nowhere") as caught:
            generate(model)
        assert caught.value.status == 404
        assert client.layers()
