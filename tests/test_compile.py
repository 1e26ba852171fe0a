"""Every specialisation of every kernel compiles to a Hopper cubin with no GPU, in registers alone."""

import pytest

from moelet.graphs import kernels
from moelet.graphs.compiler import SOURCES, Specialisation, compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.geometry import SHRINK_BYTES
from moelet.layer.errors import UnsupportedCheckpointError
from moelet.layer.spec import RoutingMethod

SPECIALISATIONS: list[Specialisation] = [
    *kernels.all_specialisations(),
    kernels.spin(),
    kernels.stream_read(stage_bytes=32 << 10, stages=6),
]


def test_every_kernel_of_the_cuda_room_is_compiled() -> None:
    assert {each.source_file for each in SPECIALISATIONS} == {path.name for path in SOURCES.glob("*.cu")}


@pytest.mark.parametrize("specialisation", SPECIALISATIONS, ids=str)
def test_compiles_without_spills_or_a_stack(specialisation: Specialisation) -> None:
    cubin = compile_kernel(specialisation.source_file, specialisation.defines, "sm_90a", store=CubinStore(None))
    assert cubin.origin == "compiled"
    assert cubin.image[:4] == b"\x7fELF"
    used = cubin.resources
    assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), cubin.log
    if "expert_mlp" in str(specialisation):
        assert used.shared_bytes <= SHRINK_BYTES, "what Geometry.direct leaves room for"
    assert "serialized" not in cubin.log, "wgmma instructions wait for each other"


def test_more_experts_than_a_warp_holds_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="among 1024 experts at most, got 1025"):
        kernels.route(RoutingMethod.SOFTMAX_TOPK, 1025)
