"""Adapters saved by PEFT, and by hand where PEFT cannot, served over HTTP: what they add is what a merge adds.

Delta is compared with delta: the answer with the adapter less the answer without it, against transformers' MoE block
with merged weights less the block as it is, in float64.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from adapters import LAYOUTS, RANK, write_layout
from checkpoints import EXPERTS, HIDDEN, moe_block, router_of, write_checkpoint
from moelet.layer.checkpoint import open_checkpoint
from moelet.service.settings import Settings
from moelet.service.startup import open_service
from oracle import frobenius_error
from peft_adapters import Deltas, fused_model, linear_model, routed_delta, save
from running_service import listening

LAYER, TOKENS = 1, 33
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
DeltaOf = Callable[[str, int], Tensor]
"""What is added to one projection of one expert of ``LAYER``, float64 ``[out, in]``."""

FUSED: dict[str, dict[str, Any]] = {
    "both parameters": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"experts.gate_up_proj": 5}, "alpha_pattern": {"experts.down_proj": 31}},
    "only gate_up": {"target_parameters": BOTH[:1]},
    "only down": {"target_parameters": BOTH[1:]},
}
LINEAR: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear rslora": {"use_rslora": True},
    "linear patterns": {"rank_pattern": {"gate_proj": 5, "down_proj": 2}, "alpha_pattern": {"up_proj": 9}},
    "linear, only gate": {"target_modules": ["gate_proj"]},
    "linear, one layer": {"target_modules": r"model\.layers\.1\.mlp\.experts\.\d+\.(gate|up|down)_proj"},
}


class Served:
    """A service over a checkpoint that transformers wrote, and the block that it must agree with."""

    def __init__(self, client: httpx.Client, block: nn.Module, folder: Path) -> None:
        self.client, self.block, self.folder = client, block, folder
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
        _, self.weights, self.ids = router_of(block)(self.hidden.double())

    def answer(self, adapter: str | None) -> Tensor:
        routed = {"topk_ids": self.ids.tolist(), "topk_weights": self.weights.tolist()}
        body = {"hidden_states": self.hidden.tolist(), "adapter": adapter, **routed}
        response = self.client.post(f"/v1/layers/{LAYER}/forward", json=body)
        assert response.status_code == 200, response.text
        return torch.tensor(response.json()["hidden_states"], dtype=torch.float64)

    def merged(self, delta_of: DeltaOf) -> Tensor:
        """What merging adds to the block's output."""
        block = copy.deepcopy(self.block)
        for expert in range(EXPERTS):
            block.experts.gate_up_proj[expert] += torch.cat([delta_of("gate", expert), delta_of("up", expert)])
            block.experts.down_proj[expert] += delta_of("down", expert)
        hidden = self.hidden.double()[None]
        return (block(hidden) - self.block(hidden))[0]

    def check(self, name: str, delta_of: DeltaOf) -> None:
        loaded = self.client.put(f"/v1/adapters/{name}", json={"path": name})
        assert loaded.status_code == 201, loaded.text
        wanted = self.merged(delta_of)
        assert wanted.norm() > 0.1 * self.answer(None).norm()
        error = frobenius_error(self.answer(name) - self.answer(None), wanted)
        assert error <= 2e-2, f"what the adapter adds is off by {error:.3e}"
        assert self.client.delete(f"/v1/adapters/{name}").status_code == 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = write_checkpoint(folder / "base", "qwen3_moe")
    block = moe_block(model, LAYER).double().requires_grad_(False)
    settings = Settings.read(checkpoint=folder / "base", adapter_root=[folder], device="cpu", max_lora_rank=8)
    with listening(open_service(settings)) as url, httpx.Client(base_url=url) as client, torch.no_grad():
        yield Served(client, block, folder)


@pytest.mark.parametrize("case", [*FUSED, *LINEAR])
def test_what_peft_saved_adds_what_peft_merges(served: Served, case: str) -> None:
    name = case.replace(" ", "-").replace(",", "")
    if case in FUSED:
        common = {"r": 3, "lora_alpha": 7, "target_modules": [], "target_parameters": BOTH}
        deltas: Deltas = save(fused_model("qwen3_moe"), served.folder / name, **(common | FUSED[case]))
    else:
        common = {"r": 3, "lora_alpha": 7, "target_modules": PROJECTIONS}
        deltas = save(linear_model(), served.folder / name, **(common | LINEAR[case]))
    served.check(name, lambda projection, expert: routed_delta(deltas, LAYER, projection, expert))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_adds_what_its_formula_says(served: Served, layout: str) -> None:
    model = open_checkpoint(served.folder / "base").model
    drawn = write_layout(served.folder / layout, layout, model)[LAYER]
    served.check(layout, lambda projection, expert: drawn[projection].delta(expert, 6 / RANK))
