"""What the kernels cannot do is refused in one sentence, before a GPU is asked for anything."""

from dataclasses import replace

import pytest

from moelet.graphs.geometry import Geometry
from moelet.graphs.limits import check_limits
from moelet.graphs.options import GraphOptions
from moelet.graphs.planning import plan_memory
from moelet.layer.errors import ConfigurationError
from moelet.layer.spec import LayerSpec, RoutingMethod, RoutingSpec
from random_layers import SPEC, model_of

GROUPED = RoutingSpec(method=RoutingMethod.SIGMOID_GROUPED, num_groups=64, topk_groups=32)


def geometry_of(spec: LayerSpec, max_loras: int = 8) -> Geometry:
    return Geometry.of(spec, router_fp32=False, max_loras=max_loras, max_lora_rank=8)


def wide(**sizes: object) -> LayerSpec:
    return replace(SPEC, num_local_experts=-1, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "max_loras", "sentence"),
    [
        (wide(num_experts=64, top_k=33), 8, "at most 32 top_k, and the layer has 33; .*--device cpu"),
        (wide(num_experts=256, top_k=8, routing=GROUPED), 8, "at most 32 groups of experts, and the layer has 64"),
        (wide(num_experts=1025, top_k=8), 8, "at most 1024 experts, and the layer has 1025"),
        (wide(num_experts=512, top_k=8), 127, "512 experts times 128 .* got 65536: lower --max-loras"),
        (wide(num_experts=512, top_k=8), 110, "shared memory.*lower --max-loras"),
    ],
)
def test_what_is_too_much_is_refused(spec: LayerSpec, max_loras: int, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        check_limits(geometry_of(spec, max_loras), 2048)
    with pytest.raises(ConfigurationError, match=sentence):
        plan_memory(model_of(spec), GraphOptions(max_loras=max_loras, max_lora_rank=8))


@pytest.mark.parametrize(
    "spec",
    [
        wide(num_experts=64, top_k=32),
        wide(num_experts=512, top_k=10),
        wide(num_experts=256, top_k=8, routing=replace(GROUPED, num_groups=32, topk_groups=16)),
    ],
)
def test_what_real_checkpoints_ask_for_is_not(spec: LayerSpec) -> None:
    check_limits(geometry_of(spec), 2048)
