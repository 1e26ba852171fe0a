"""Where h of gate and up is made by a kernel before the expert MLP, and that this kernel may then start early."""

from dataclasses import replace

import pytest

from fake_layer import FakeLayer
from moelet.graphs.buffers import RoutingInput
from moelet.graphs.hazards import find_hazards
from moelet.graphs.pool import Variant
from moelet.graphs.program import Plan
from ordering import ordering_edges
from random_layers import SPEC

pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize(
    ("tokens", "rank", "kernels"),
    [
        (64, 32, ["expert_mlp"]),
        (65, 32, ["lora_shrink of gate_up", "expert_mlp"]),
        (33, 40, ["lora_shrink of gate_up", "expert_mlp"]),
        (9, 40, ["lora_shrink of gate_up", "gate_up_gemm", "lora_shrink of down", "down_gemm"]),
        (65, 0, ["expert_mlp"]),
    ],
)
def test_what_is_too_much_for_its_warps_is_shrunk_before(
    tokens: int, rank: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = FakeLayer(monkeypatch, replace(SPEC, num_experts=64), (tokens,), rank=rank or 32)
    variant = Variant(tokens, RoutingInput.TOPK, rank > 0)
    graph = layer.pool.build(variant, Plan.FUSED, captured=True).graph
    assert graph is not None
    topology = graph.topology()
    assert [node.label for node in topology.nodes] == ["sort", "gather", *kernels, "finalize"]
    assert find_hazards(topology) == []
    for edge in ordering_edges(topology):
        assert find_hazards(topology.without(edge)) != []
    hasty = [replace(node, holds=False) for node in topology.nodes]
    found = {hazard.buffer for hazard in find_hazards(replace(topology, nodes=hasty))}
    assert ("tokens" in found) == (len(kernels) > 1), "which the kernel behind a shrink does not wait for"
