"""What ``inspect`` says, against tensors of the sizes it speaks of."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from moelet.layer.adapter import Adapter, LayerAdapter, LoraWeights
from moelet.layer.report import adapter_report, checkpoint_report, routing_in_words
from moelet.layer.spec import LayerSpec, ModelSpec, RoutingMethod, RoutingSpec
from moelet.layer.weights import LayerWeights

HIDDEN, WIDTH, EXPERTS, RANK = 70, 40, 6, 3
PLAIN = LayerSpec(index=1, hidden_size=HIDDEN, intermediate_size=WIDTH, num_experts=EXPERTS, top_k=2)
SHARED = replace(PLAIN, index=3, shared_intermediate_size=2 * WIDTH + 5, shared_gated=True)
MODEL = ModelSpec(
    name="tiny",
    model_type="qwen2_moe",
    path=Path("some/tiny"),
    num_hidden_layers=5,
    layers={3: SHARED, 1: PLAIN},
    skipped={0: "it is dense", 2: "it is dense", 4: "it was left out"},
)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def weights_of(spec: LayerSpec) -> LayerWeights:
    shared, local = spec.shared_intermediate_size, spec.num_local_experts
    weights = LayerWeights(
        gate_up=zeros(local, 2 * WIDTH, HIDDEN),
        down=zeros(local, HIDDEN, WIDTH),
        router=torch.zeros(EXPERTS, HIDDEN),
        shared_gate_up=zeros(2 * shared, HIDDEN) if shared else None,
        shared_down=zeros(HIDDEN, shared) if shared else None,
        shared_gate=zeros(1, HIDDEN) if shared else None,
    )
    weights.check(spec)
    return weights


def test_checkpoint_bytes_are_those_of_the_tensors() -> None:
    weights = {index: weights_of(spec) for index, spec in MODEL.layers.items()}
    nbytes = {index: w.nbytes for index, w in weights.items()}
    report = checkpoint_report(MODEL, nbytes, ["a note"])
    assert [layer.index for layer in report.layers] == [1, 3]
    assert [layer.weight_bytes for layer in report.layers] == [weights[1].nbytes, weights[3].nbytes]
    assert report.weight_bytes == sum(nbytes.values())
    assert report.notes == ("a note",)


def test_a_slice_of_the_experts_says_which() -> None:
    model = replace(MODEL, layers={1: PLAIN.expert_slice(2, 3)})
    layer = checkpoint_report(model, {1: 10**6}, []).layers[0]
    assert (layer.num_experts, layer.num_local_experts, layer.local_expert_offset) == (EXPERTS, 3, 2)


def test_skipped_layers_are_grouped_by_reason() -> None:
    report = checkpoint_report(MODEL, {1: 10**6, 3: 10**6}, [])
    assert [(s.layers, s.reason) for s in report.skipped] == [("0,2", "it is dense"), ("4", "it was left out")]


def test_reports_are_json() -> None:
    report = asdict(checkpoint_report(MODEL, {1: 10**6, 3: 10**6}, ["n"]))
    text = json.loads(json.dumps(report, allow_nan=False))
    assert text["path"] == "some/tiny"
    assert text["layers"][1]["shared_intermediate_size"] == 85
    again = json.loads(json.dumps(asdict(adapter_report(adapter(), MODEL)), allow_nan=False))
    assert again["layers"][0]["projections"][0]["name"] == "gate"


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (RoutingSpec(), "softmax over all experts, then the best 2 of 6 experts, weights not renormalised"),
        (RoutingSpec(renormalize=True, routed_scaling_factor=2.5), "weights divided by their sum, times 2.5"),
        (RoutingSpec(method=RoutingMethod.TOPK_SOFTMAX), "the best 2 of 6 experts by logit, then softmax over those"),
        (
            RoutingSpec(method=RoutingMethod.SIGMOID_GROUPED, num_groups=3, topk_groups=2, has_correction_bias=True),
            "the best 2 of 6 experts by sigmoid plus a correction bias within the best 2 of 3 groups",
        ),
        (RoutingSpec(method=RoutingMethod.SIGMOID_GROUPED), "by sigmoid, weights not renormalised"),
    ],
)
def test_routing_in_words(routing: RoutingSpec, words: str) -> None:
    assert words in routing_in_words(replace(PLAIN, routing=routing))


def lora(in_features: int, out_features: int, ranks: list[int], scaling: list[float], a: int, b: int) -> LoraWeights:
    return LoraWeights(
        a=zeros(a, max(ranks), in_features),
        b=zeros(b, out_features, max(ranks)),
        scaling=torch.tensor(scaling),
        ranks=torch.tensor(ranks, dtype=torch.int32),
    )


def adapter(**layers: LayerAdapter) -> Adapter:
    gate = lora(HIDDEN, WIDTH, [3, 0, 8, 3, 3, 3], [2.0, 9.0, 0.5, 2.0, 2.0, 2.0], 1, EXPERTS)
    down = lora(WIDTH, HIDDEN, [4] * EXPERTS, [1.0] * EXPERTS, EXPERTS, EXPERTS)
    shared = lora(HIDDEN, 2 * WIDTH + 5, [2], [1.5], 1, 1)
    return Adapter(
        path=Path("some/adapter"),
        rank=8,
        lora_alpha=16.0,
        scaling=2.0,
        layers={
            1: LayerAdapter(gate=gate, down=down),
            3: LayerAdapter(shared_up=shared),
            **{int(name[1:]): layer for name, layer in layers.items()},
        },
        ignored_keys=(
            "model.layers.1.self_attn.q_proj.lora_A.weight",
            "model.layers.3.self_attn.q_proj.lora_A.weight",
            "model.layers.4.mlp.experts.0.up_proj.lora_B.weight",
            "model.layers.4.mlp.experts.11.up_proj.lora_B.weight",
        ),
    )


def test_an_adapter_projection_by_projection() -> None:
    report = adapter_report(adapter())
    assert (report.layout, report.max_rank, report.bytes) == ("mixed", 8, adapter().nbytes)
    assert report.targets == ("gate", "down", "shared_up")
    gate, down = report.layers[0].projections
    assert (gate.name, gate.in_features, gate.out_features) == ("gate", HIDDEN, WIDTH)
    assert (gate.num_experts, gate.of_experts, gate.min_rank, gate.max_rank) == (5, EXPERTS, 3, 8)
    assert (gate.min_scaling, gate.max_scaling, gate.shared) == (0.5, 2.0, "A")
    assert (down.in_features, down.out_features, down.shared) == (WIDTH, HIDDEN, "")
    assert report.layers[1].projections[0].shared == ""
    assert (report.base, report.refused) == (None, ())


def test_ignored_keys_are_grouped_with_reasons() -> None:
    ignored = adapter_report(adapter(), MODEL).ignored
    assert [(i.pattern, i.count, i.reason) for i in ignored] == [
        (
            "model.layers.*.self_attn.q_proj.lora_A.weight",
            2,
            "it belongs to a module that is not an expert of a served MoE layer",
        ),
        ("model.layers.*.mlp.experts.*.up_proj.lora_B.weight", 2, "layer 4 is not served: it was left out"),
    ]


def test_an_adapter_that_fits_its_base_is_not_refused() -> None:
    report = adapter_report(adapter(), MODEL)
    assert (report.base, report.refused) == ("tiny", ())


def test_an_adapter_of_another_base_says_where_it_does_not_fit() -> None:
    few = lora(HIDDEN, WIDTH, [2] * 5, [1.0] * 5, 5, 5)
    turned = lora(WIDTH, HIDDEN, [2] * EXPERTS, [1.0] * EXPERTS, EXPERTS, EXPERTS)
    layers = {
        "l1": LayerAdapter(gate=few, up=turned),
        "l3": LayerAdapter(shared_down=lora(HIDDEN, 2 * WIDTH + 5, [2], [1.0], 1, 1)),
        "l4": LayerAdapter(up=few),
        "l9": LayerAdapter(up=few),
    }
    assert adapter_report(adapter(**layers), MODEL).refused == (
        "layer 1 gate: expected [experts, out, in] [6, 40, 70], found [5, 40, 70]",
        "layer 1 up: expected [experts, out, in] [6, 40, 70], found [6, 70, 40]",
        "layer 3 shared_down: expected [experts, out, in] [1, 70, 85], found [1, 85, 70]",
        "layer 4: it is not served: it was left out",
        "layer 9: it is not served: there is no such layer",
    )
