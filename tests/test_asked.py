"""A start compiles every kernel before anything is captured: what is asked for beforehand is what is loaded then."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fake_layer import LayerDriver
from moelet.graphs import kernels, plan_choice
from moelet.graphs.compiler import Cubin, Resources, Specialisation
from moelet.graphs.engine import GraphEngine
from moelet.graphs.gemm_config import LORA_TILE
from moelet.graphs.kernels import Progress
from moelet.graphs.options import GraphOptions
from moelet.graphs.plan_choice import Measured, layer_key
from moelet.graphs.program import Plan
from moelet.layer.spec import LayerSpec
from random_layers import GROUPED_SPEC, SHARED_SPEC, SPEC, model_of, random_batch, random_weights, slice_weights

pytest.importorskip("cuda.bindings.driver")

ONE_EXPERT = LayerSpec(index=2, hidden_size=64, intermediate_size=64, num_experts=1, top_k=1)
"""Of this, batches are wide as soon as they have the tokens for it."""

FEW: dict[str, Any] = {"decode_shapes": (1, 8, 200), "max_decode_tokens": 200, "max_eager_tokens": 600}
WIDE: dict[str, Any] = {"decode_shapes": (300,), "max_decode_tokens": 400, "max_eager_tokens": 600}
CASES: dict[str, tuple[LayerSpec, dict[str, Any], set[str]]] = {
    "all shapes": (SPEC, {}, {"token_mlp", "expert_mlp", "grouped_gemm", "wide_gemm", "narrow_sort"}),
    "no slots": (
        SPEC,
        {"max_loras": 0, **FEW},
        {"token_mlp", "expert_mlp", "grouped_gemm", "narrow_sort", "wide_sort"},
    ),
    "gated shared": (SHARED_SPEC, FEW, {"gate"}),
    "grouped": (GROUPED_SPEC, FEW, {"route"}),
    "slice": (replace(SHARED_SPEC, num_local_experts=2, local_expert_offset=3), FEW, {"expert_mlp"}),
    "lone": (replace(SPEC, intermediate_size=200), FEW, {"direct_gemm"}),
    "wide": (ONE_EXPERT, WIDE, {"wide_gemm", "wide_sort", "wide_gather", "grouped_gemm"}),
    "wide, two streams": (ONE_EXPERT, {"plan": Plan.TWO_STREAM, **WIDE}, {"wide_gather", "activation", "wide_sort"}),
    **{plan.value: (SPEC, {"plan": plan, **FEW}, {"lora_expand", "activation"}) for plan in Plan if plan != Plan.FUSED},
}
"""A layer, options, and kernels that these are known to need."""


class Driver(LayerDriver):
    """The fake driver, and what it was given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def cuModuleLoadData(self, image: bytes) -> Any:
        self.loaded.append(image.decode())
        return super().cuModuleLoadData(image)


class Compiler:
    """Compiles nothing, and only what is asked for beforehand; the image of a cubin says what it is of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str] = []
        monkeypatch.setattr(kernels, "compile_kernels", self.compile_kernels)
        monkeypatch.setattr(kernels, "compile_kernel", self.compile_kernel)

    def compile_kernels(
        self, specialisations: Iterable[Specialisation], *_: object, told: Callable[[int, int], None], **__: object
    ) -> dict[str, Cubin]:
        found = {str(each): each.kernel for each in specialisations}
        self.compiled += found
        for done in range(len(found) + 1):
            told(done, len(found))
        nothing = Resources(64, 0, 0, 0, 0)
        return {text: Cubin(name, "sm_90a", text.encode(), "", nothing, "compiled") for text, name in found.items()}

    def compile_kernel(self, source_file: str, defines: object, *_: object, **__: object) -> Cubin:
        raise AssertionError(f"{source_file} {defines} was compiled while graphs were captured")


def names(specialisations: Iterable[str]) -> set[str]:
    return {text.split(".cu")[0] for text in specialisations}


def started(
    monkeypatch: pytest.MonkeyPatch,
    specs: Iterable[LayerSpec],
    router: torch.dtype = torch.bfloat16,
    progress: Progress = lambda *_: None,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """What starting, and forwards of each layer, loaded, and what was compiled."""
    driver, compiler = Driver(), Compiler(monkeypatch)
    driver.install(monkeypatch)
    layers = {index: replace(spec, index=index) for index, spec in enumerate(specs)}
    model = replace(model_of(layers[0]), layers=layers)
    engine = GraphEngine(model, GraphOptions(**{"max_loras": 3, "max_lora_rank": 16, **options}))
    for index, spec in layers.items():
        whole = replace(spec, num_local_experts=spec.num_experts, local_expert_offset=0)
        weights = slice_weights(spec, random_weights(whole))
        engine.add_layer(index, replace(weights, router=weights.router.to(router)))
    engine.start(progress)
    for spec in layers.values():
        for tokens in (1, engine.batch_tokens + 1):
            engine.forward(random_batch(spec, tokens))
    engine.close()
    return driver.loaded, compiler.compiled


@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_for_beforehand_is_what_is_loaded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, options, known = CASES[case]
    loaded, compiled = started(monkeypatch, [spec], **options)
    assert sorted(loaded) == sorted(compiled)
    assert {"fetch", *known} <= names(compiled)
    assert any("LORA=1" in text or "lora" in text for text in compiled) is (options.get("max_loras") != 0)


def test_shapes_with_plans_of_their_own_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tuple(
        Measured("Fake H200", layer_key(SPEC), tokens, {each: 2.0 - (each is plan) for each in Plan}, "2030-01-01")
        for tokens, plan in ((1, Plan.FUSED), (8, Plan.SINGLE_STREAM), (200, Plan.TWO_STREAM_OVERLAP_DOWN))
    )
    monkeypatch.setattr(plan_choice, "measured", lambda: table)
    loaded, compiled = started(monkeypatch, [SPEC], **FEW)
    assert sorted(loaded) == sorted(compiled)
    assert "token_mlp.cu LORA=1" in compiled
    assert {"lora_expand", "activation"} <= names(compiled)


def test_layers_of_several_geometries_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, compiled = started(monkeypatch, [SPEC, SHARED_SPEC, SPEC, ONE_EXPERT], **FEW)
    assert sorted(loaded) == sorted(compiled)
    assert len([text for text in compiled if text.startswith("gate.cu")]) == 2


def test_a_router_in_fp32_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, compiled = started(monkeypatch, [SPEC], torch.float32, **FEW)
    assert sorted(loaded) == sorted(compiled)
    assert any("ROUTER_FP32=1" in text for text in compiled)


def test_people_are_told_of_kernels_and_then_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    _, compiled = started(monkeypatch, [SPEC], progress=lambda *step: told.append(step), **FEW)
    kernels_, graphs = len(compiled), 5 * 6  # five shapes, each by what routes it and with or without adapters
    assert told == [
        *(("compiling kernels", done, kernels_) for done in range(kernels_ + 1)),
        *(("capturing graphs", done, graphs) for done in range(graphs + 1)),
    ]


def test_the_longest_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, compiled = started(monkeypatch, [SPEC])
    assert compiled[0].startswith("expert_mlp.cu")
    assert all(word in compiled[0] for word in ("LORA=1", f"MAX_N={LORA_TILE}"))
    assert compiled.index("narrow_sort.cu") > len(compiled) // 2
