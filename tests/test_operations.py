"""The numbers of docs/operations.md against the memory plan that `inspect` prints, and adapters as they are loaded."""

from pathlib import Path

import pytest

from moelet.graphs.options import GraphOptions
from moelet.graphs.planning import MemoryPlan, plan_memory
from moelet.layer.spec import LayerSpec, ModelSpec, RoutingSpec
from running_service import EXPERTS, HIDDEN, LAYERS, WIDTH, random_adapter
from source_tree import ROOT

TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
E, H, I, DEPTH = 128, 2048, 768, 48  # noqa: E741 - the names of the document


def qwen3_30b() -> ModelSpec:
    routing = RoutingSpec(renormalize=True)
    layers = {
        i: LayerSpec(index=i, hidden_size=H, intermediate_size=I, num_experts=E, top_k=8, routing=routing)
        for i in range(DEPTH)
    }
    return ModelSpec(name="model", model_type="qwen3_moe", path=Path("model"), num_hidden_layers=DEPTH, layers=layers)


def planned(max_lora_rank: int) -> MemoryPlan:
    return plan_memory(qwen3_30b(), GraphOptions(max_loras=8, max_lora_rank=max_lora_rank))


def test_weights_take_what_the_formula_says() -> None:
    assert "`6 · E · H · I`" in TEXT
    by_formula = DEPTH * 6 * E * H * I
    assert planned(16).weight_bytes == pytest.approx(by_formula, rel=0.01)
    assert f"{by_formula / 1e9:.0f} GB of weights" in TEXT


@pytest.mark.parametrize(("rank", "told"), [(16, "{:.2f}"), (64, "{:.1f}")])
def test_slots_take_what_the_formula_says(rank: int, told: str) -> None:
    assert "`6 · R · (H + I) · E`" in TEXT
    by_formula = DEPTH * 6 * rank * (H + I) * E
    plan = planned(rank)
    assert plan.slot_bytes == pytest.approx(by_formula, rel=0.01)
    assert plan.all_slots_bytes == 8 * plan.slot_bytes
    assert f"{told.format(by_formula / 1e9)} GB" in TEXT


def test_an_adapter_takes_what_the_formula_says() -> None:
    assert "`6 · r · (H + I) · E`" in TEXT
    for rank in (3, 8):
        by_formula = len(LAYERS) * 6 * rank * (HIDDEN + WIDTH) * EXPERTS
        scales = len(LAYERS) * 3 * EXPERTS * 8
        assert by_formula <= random_adapter(1, rank).nbytes <= by_formula + scales
