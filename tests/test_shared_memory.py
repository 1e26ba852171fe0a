"""The shared memory that GEMMs and expert MLPs ask for, against what their kernels carve up."""

from pathlib import Path

import pytest

from moelet.graphs.gemm_config import (
    EXCLUSIVE_BYTES,
    FEW_TILE,
    LORA_ENTRIES,
    LORA_TILE,
    MLP_TILES,
    TOKEN_TILES,
    GemmConfig,
    deep_config,
    few_config,
    gemm_config,
    halved_config,
)
from moelet.graphs.geometry import DIRECT_ROWS, Geometry
from moelet.graphs.kernels import (
    EPILOGUE_ACTIVATION,
    EPILOGUE_BOTH,
    EPILOGUE_DOWN,
    EPILOGUE_DOWN_FP32,
    EPILOGUE_GATE_UP,
    grouped_gemm,
)
from moelet.layer.spec import LayerSpec
from static_asserts import check, constants_of, defines_of

HOPPER_SHARED_BYTES = 227 << 10
"""What one block may ask for, from the CUDA programming guide's table of compute capability 9.0."""
GEMMS = {
    (EPILOGUE_GATE_UP, False): 0,
    (EPILOGUE_DOWN_FP32, False): 0,
    (EPILOGUE_ACTIVATION, False): 0,
    (EPILOGUE_DOWN, False): 0,
    (EPILOGUE_ACTIVATION, True): 2,
    (EPILOGUE_DOWN, True): 1,
}
"""Projections of whose delta a GEMM brings the parts in, by its epilogue and whether it adds one."""
RINGS_SLACK = 32
"""What rounding each of the rings up to 16 bytes may add to them all."""


@pytest.mark.parametrize("tile", TOKEN_TILES)
@pytest.mark.parametrize(("epilogue", "lora"), GEMMS)
def test_the_gemm_asks_for_the_shared_memory_that_it_carves_up(
    tile: int, epilogue: int, lora: bool, tmp_path: Path
) -> None:
    config, projections = gemm_config(tile, lora=lora), GEMMS[epilogue, lora]
    asked = config.shared_bytes(staging=epilogue == EPILOGUE_ACTIVATION, lora_projections=projections)
    assert_carved_up(tmp_path, config, epilogue, projections, asked)


@pytest.mark.parametrize("experts", [1, 256])
@pytest.mark.parametrize(
    ("epilogue", "lora"), [(EPILOGUE_ACTIVATION, False), (EPILOGUE_BOTH, False), (EPILOGUE_BOTH, True)]
)
@pytest.mark.parametrize("config", [gemm_config(FEW_TILE, direct=True), deep_config(), few_config()], ids=str)
def test_the_direct_kernels_ask_for_the_shared_memory_that_they_carve_up(
    config: GemmConfig, epilogue: int, lora: bool, experts: int, tmp_path: Path
) -> None:
    spec = LayerSpec(index=0, hidden_size=72, intermediate_size=40, num_experts=experts, top_k=1)
    geometry = Geometry.of(spec, router_fp32=False, max_loras=3, max_lora_rank=20)
    projections = 2 * lora
    asked = config.shared_bytes(staging=True, lora_projections=projections, direct_for=geometry)
    plan = "kDirectRows * (sizeof(DirectTile) + 3 * 2 + kRowAlign) + 4 * (32 + 2 * EXPERTS)"
    asserts = [f"{plan} == {geometry.direct_plan_bytes}", f"kDirectRows == {DIRECT_ROWS}"]
    check(tmp_path, '#include "common/direct.cuh"', asserts, {"EXPERTS": experts})
    more = f" + {geometry.hidden_blocks} * kTokenBytes + {geometry.direct_plan_bytes}"
    assert_carved_up(tmp_path, config, epilogue, projections, asked, more)


MLPS = [(gemm_config(tile, lora=lora), lora) for tile in MLP_TILES for lora in (False, True)]


@pytest.mark.parametrize(
    ("config", "lora"), [*MLPS, (halved_config(), False), (gemm_config(LORA_TILE, lora=True), True)]
)
def test_the_mlp_asks_for_the_shared_memory_that_it_carves_up(config: GemmConfig, lora: bool, tmp_path: Path) -> None:
    asked = config.shared_bytes(staging=True, lora_projections=2 * lora)
    assert_carved_up(tmp_path, config, EPILOGUE_BOTH, 2 * lora, asked)


def assert_carved_up(
    folder: Path, config: GemmConfig, epilogue: int, projections: int, asked: int, more: str = ""
) -> None:
    """The kernel's shared memory is what is ``asked`` for, less what rounding its rings up and exclusion may add."""
    lora, down = projections > 0, epilogue in (EPILOGUE_DOWN, EPILOGUE_DOWN_FP32)
    threads = config.threads(lora=lora, mlp=epilogue == EPILOGUE_BOTH)
    rings = "sizeof(Ring) + sizeof(LoraRing) + sizeof(Announcements) + sizeof(WrittenItems)"
    taken = f"STAGES * kStageBytes + kLoraStages * kLoraStageBytes + kStagingBytes + {rings}" + more
    asserts = [
        f"{taken} <= {asked}",
        f"kThreads == {threads}",
        f"kEntries == {config.lora_entries if lora else LORA_ENTRIES}",
    ]
    asserts += ["sizeof(Ring) % alignof(LoraRing) == 0", "kLoraStageBytes % 128 == 0"]
    asserts.append(f"kHTokenBytes<{int(down)}> % 16 == 0")
    if asked > EXCLUSIVE_BYTES:
        asserts.append(f"{taken} > {asked - RINGS_SLACK}")
    if lora:
        asserts.append(f"kProjections<{int(down)}> == {projections}")
    defines = defines_of(grouped_gemm(config, epilogue, lora=lora))
    defines |= {"DIRECT": int(config.direct), "HALVES": config.halves}
    check(folder, constants_of("common/gemm_block.cuh", "struct Memory {"), asserts, defines)
    assert asked <= HOPPER_SHARED_BYTES < 2 * asked, "one block an SM, and no more"
