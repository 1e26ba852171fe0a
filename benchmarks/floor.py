"""The bytes that a layer forward cannot do without, counted from its routing: what its time is measured against.

Every weight of an expert that some token is sent to is read once, ``3 * H * I`` numbers of bf16, and of every live
(adapter, expert) pair A and B at the adapter's true rank, ``3 * r * (H + I)`` numbers. An adapter of the shared-outer
layout has one A of gate, of up, and one B of down for all experts: those count once for each live adapter.
Hidden states, the output and everything in between are not counted: they fit into L2.
"""

from dataclasses import dataclass

import torch

from moelet.layer.engine import LayerBatch
from moelet.layer.spec import LayerSpec

BF16 = 2
MATRICES = ("gate_up", "down", "a_gate_up", "b_gate_up", "a_down", "b_down")
"""What bytes are counted for: the weights of the two GEMMs, then the adapters' matrices in the order of their use."""
H200_TFLOPS = 785.0
"""What an H200 makes of a bf16 product of 8192 by 8192 by 8192 by cuBLAS, measured where the peers were."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What a routing touches: distinct local experts, live (adapter, expert) pairs, adapters with a pair, and adapters
    that any token has (those that the shared experts meet)."""

    experts: int
    pairs: int
    paired_adapters: int
    adapters: int

    @classmethod
    def of(cls, spec: LayerSpec, batch: LayerBatch) -> "Hits":
        """The hits of one batch with given top-k."""
        assert batch.topk_ids is not None
        ids = batch.topk_ids
        local = (ids >= spec.local_expert_offset) & (ids < spec.local_expert_end)
        experts = len(torch.unique(ids[local]))
        if batch.token_slots is None:
            return cls(experts, 0, 0, 0)
        slots = batch.token_slots[:, None].expand_as(ids)
        live = torch.unique(torch.stack((slots, ids), dim=-1)[local & (slots >= 0)], dim=0)
        present = torch.unique(batch.token_slots[batch.token_slots >= 0])
        return cls(experts, len(live), len(torch.unique(live[:, 0])), len(present))


def matrix_bytes(spec: LayerSpec, hits: Hits, rank: int = 0, *, shared_outer: bool = False) -> dict[str, int]:
    """Bytes by matrix (``MATRICES``), the shared experts' among them where ``spec`` holds them."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    shared = spec.shared_intermediate_size if spec.holds_shared_experts else 0
    outer = hits.paired_adapters if shared_outer else hits.pairs
    numbers = {
        "gate_up": 2 * hidden * (hits.experts * inter + shared),
        "down": hidden * (hits.experts * inter + shared),
        "a_gate_up": 2 * rank * hidden * (outer + (hits.adapters if shared else 0)),
        "b_gate_up": 2 * rank * (hits.pairs * inter + hits.adapters * shared),
        "a_down": rank * (hits.pairs * inter + hits.adapters * shared),
        "b_down": rank * hidden * (outer + (hits.adapters if shared else 0)),
    }
    return {name: BF16 * count for name, count in numbers.items()}


def arithmetic_us(spec: LayerSpec, num_tokens: int, tflops: float = H200_TFLOPS) -> float:
    """Microseconds of the base layer's arithmetic at ``tflops``: ``2 * 3 * H * I`` operations for each of the ``T * k``
    slot rows, of a slice for as many of them as uniform routing gives it, and the shared experts'."""
    local = spec.top_k * spec.num_local_experts / spec.num_experts
    shared = spec.shared_intermediate_size if spec.holds_shared_experts else 0
    per_token = 6.0 * spec.hidden_size * (local * spec.intermediate_size + shared)
    return num_tokens * per_token / tflops * 1e-6


def expected_experts(spec: LayerSpec, num_tokens: int) -> float:
    """Distinct local experts to expect of uniform routing: ``E_local * (1 - (1 - k/E)^T)``."""
    return spec.num_local_experts * (1.0 - (1.0 - spec.top_k / spec.num_experts) ** num_tokens)


def expert_bytes(spec: LayerSpec) -> int:
    """Bytes of one routed expert."""
    return 3 * spec.hidden_size * spec.intermediate_size * BF16
