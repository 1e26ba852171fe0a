"""Every specialisation of every kernel compiles to a Hopper cubin with no GPU, in registers alone."""

import pytest

from moelet.graphs import kernels
from moelet.graphs.compiler import SOURCES, Specialisation, compile_kernel
from moelet.graphs.cubins import CubinStore
from moelet.graphs.gemm_config import MOST_SHARED_BYTES, gemm_config
from moelet.graphs.geometry import SHRINK_BYTES
from moelet.graphs.nvrtc import knows_no_cache
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
    most = 0 if knows_no_cache() else 8  # which the first NVRTC 13.0 spills of one kernel
    assert max(used.spill_stores, used.spill_loads, used.stack_bytes) <= most, cubin.log
    if specialisation.source_file == "expert_mlp.cu":
        defines = dict(specialisation.defines)
        lora = bool(defines["LORA"])
        asked = gemm_config(int(defines["MAX_N"]), lora=lora).shared_bytes(staging=True, lora_projections=2 * lora)
        room = SHRINK_BYTES if defines["DIRECT"] else MOST_SHARED_BYTES - asked
        assert used.shared_bytes <= room, "what is left beside the ring"
    assert "serialized" not in cubin.log, "wgmma instructions wait for each other"


def test_more_experts_than_a_warp_holds_are_refused() -> None:
    with pytest.raises(UnsupportedCheckpointError, match="among 1024 experts at most, got 1025"):
        kernels.route(RoutingMethod.SOFTMAX_TOPK, 1025)
