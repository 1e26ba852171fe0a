"""What Python packs for the kernels against what they read: LoRA fragments, structs, and the layout's formulas."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelet.graphs import buffers, kernels
from moelet.graphs.gemm_config import RANK_BLOCK
from moelet.graphs.geometry import ROW_ALIGN
from moelet.graphs.nvrtc import CompileError
from moelet.graphs.packing import pack_a, pack_b_down, pack_b_gate_up
from moelet.layer.layout import BLOCK_K, CHUNK, PackedShape, down_stored_rows, gate_up_stored_rows
from static_asserts import check, constants_of

pytest.importorskip("cuda.bindings.nvrtc")

RANKS = st.integers(1, 25)
EXPERTS = st.integers(1, 3)

# Device functions are let into constant expressions, so that the compiler evaluates the header itself.
CONSTANT_LAYOUT = """#include "common/types.cuh"
#undef __forceinline__
#define __forceinline__ constexpr
#include "common/layout.cuh"
"""


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small integers, zero not among them: sums of their products are exact in every order."""
    values = torch.randint(1, 4, shape, generator=torch.Generator().manual_seed(seed))
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed + 1)) * 2 - 1
    return (values * signs).bfloat16()


@settings(deadline=None, max_examples=20)
@given(EXPERTS, RANKS, st.integers(1, 130))
def test_a_lies_in_blocks_of_eight_ranks_by_32_of_k(experts: int, rank: int, k: int) -> None:
    a = whole_numbers(experts, rank, k)
    stride = -(-k // BLOCK_K) * BLOCK_K
    packed = pack_a(a, stride).tensor().reshape(experts, -1, stride // 32, 8, 32)
    assert packed.shape == (experts, -(-rank // 8), stride // 32, 8, 32)
    flat = packed.flatten()
    e, r, c = torch.meshgrid(*(torch.arange(n) for n in (experts, -(-rank // 8) * 8, stride)), indexing="ij")
    block = (e * packed.shape[1] + r // 8) * packed.shape[2] + c // 32
    found = flat[(block * 8 + r % 8) * 32 + c % 32]
    assert torch.equal(found[:, :rank, :k], a)
    assert found.count_nonzero() == a.numel()


def fragment_product(packed: Tensor, low_h: Tensor, high_h: Tensor) -> tuple[Tensor, Tensor]:
    """What m16n8k8 makes of stored fragments: rows i against ``low_h``, rows i + 8 against ``high_h``, each
    ``[blocks of 16 rows, 8]``.

    As expand and GEMMs read them: one block of eight ranks is 256 bytes for each 16 rows, lane ``4 * i + c`` has 8
    bytes, first the row i and then the row i + 8, of each the ranks 2c and 2c + 1.
    """
    rank_blocks, row_blocks = packed.shape[:2]
    words = packed.float().reshape(rank_blocks, row_blocks, 32, 4)
    low, high = torch.zeros(row_blocks, 8), torch.zeros(row_blocks, 8)
    for block in range(rank_blocks):
        for lane in range(32):
            i, c = divmod(lane, 4)
            for j in range(2):
                rank = 8 * block + 2 * c + j
                low[:, i] += words[block, :, lane, j] * low_h[rank]
                high[:, i] += words[block, :, lane, 2 + j] * high_h[rank]
    return low, high


@settings(deadline=None, max_examples=20)
@given(EXPERTS, RANKS, st.integers(1, 70))
def test_b_of_down_gives_the_gemms_features_to_a_lane(experts: int, rank: int, hidden: int) -> None:
    b, h = whole_numbers(experts, hidden, rank), whole_numbers(-(-rank // 8) * 8, seed=7).float()
    packed = pack_b_down(b, 128).tensor().reshape(experts, -(-rank // 8), 8, 128)
    for expert in range(experts):
        low, high = fragment_product(packed[expert], h, h)
        delta = torch.zeros(128)
        for block in range(8):
            for i in range(8):  # one 32-bit word of the delta
                feature = 32 * (block // 2) + 4 * i + 2 * (block % 2)
                delta[feature], delta[feature + 1] = low[block, i], high[block, i]
        expected = torch.zeros(128)
        expected[:hidden] = b[expert].float() @ h[:rank]
        assert torch.equal(delta, expected)


@settings(deadline=None, max_examples=20)
@given(EXPERTS, RANKS, st.integers(1, 70))
def test_b_of_gate_and_up_gives_both_of_a_feature_to_a_lane(experts: int, rank: int, width: int) -> None:
    gate, up = whole_numbers(experts, width, rank, seed=1), whole_numbers(experts, width, rank, seed=2)
    gate_h, up_h = (whole_numbers(-(-rank // 8) * 8, seed=seed).float() for seed in (3, 4))
    packed = pack_b_gate_up(gate, up, 128).tensor().reshape(experts, -(-rank // 8), 16, 128)
    for expert in range(experts):
        up_rows, gate_rows = fragment_product(packed[expert], up_h, gate_h)
        pairs = torch.zeros(128, 2)
        for block in range(16):
            for i in range(8):
                feature = 16 * (block // 2) + 2 * i + block % 2
                pairs[feature] = torch.stack((gate_rows[block, i], up_rows[block, i]))
        expected = torch.zeros(128, 2)
        expected[:width, 0] = gate[expert].float() @ gate_h[:rank]
        expected[:width, 1] = up[expert].float() @ up_h[:rank]
        assert torch.equal(pairs, expected)


def test_fragments_are_where_the_gemm_keeps_its_accumulators(tmp_path: Path) -> None:
    """Feature of rows l/4 and l/4 + 8 of a warp, as the headers say and as the weights' row order has it."""
    gate_up, down = gate_up_stored_rows(256), down_stored_rows(256)
    asserts = []
    for warp_row in range(0, 256, 16):
        for i in range(8):
            up = (gate_up[256:] == warp_row + i).nonzero().item()
            assert gate_up[up] == warp_row + i + 8, "the gate is eight rows below the up"
            asserts.append(f"gate_up_feature({warp_row}, {i}) == {up}")
            first = (down == warp_row + i).nonzero().item()
            assert down[first + 1] == warp_row + i + 8, "the next output feature is eight rows below"
            asserts.append(f"down_feature({warp_row}, {i}) == {first}")
    check(tmp_path, CONSTANT_LAYOUT, asserts)


def test_the_layout_header_is_the_layout_module(tmp_path: Path) -> None:
    asserts = [
        f"kBlockK == {BLOCK_K}",
        f"kChunk == {CHUNK}",
        f"kRowAlign == {ROW_ALIGN}",
        f"kBlockBytes == {2 * BLOCK_K}",
    ]
    for rows in (8, 24, 128):
        packed = PackedShape(rows, 200, 8)
        for row in (0, 3, 7, rows - 8, rows - 1):
            for k in (0, 7, 8, 63, 64, 100, 199):
                offset = packed.offset(0, row, k, swizzled=True)
                asserts.append(f"block_major_offset({row}, {k}, {rows}) == {offset}")
    check(tmp_path, CONSTANT_LAYOUT, asserts)
    with pytest.raises(CompileError, match="static assertion failed"):
        check(tmp_path, CONSTANT_LAYOUT, ["block_major_offset(3, 70, 8) == 71"])


TWINS = {
    "LayerArgs": ("layer_args", buffers.LAYER_ARGS),
    "LoraEntry": ("layer_args", buffers.LORA_ENTRY),
    "TokenTile": ("tiles", buffers.TOKEN_TILE),
    "LoraGroup": ("tiles", buffers.LORA_GROUP),
}


@pytest.mark.parametrize("struct", TWINS)
def test_structs_are_their_numpy_twins(struct: str, tmp_path: Path) -> None:
    header, dtype = TWINS[struct]
    assert dtype.fields is not None
    asserts = [f"sizeof({struct}) == {dtype.itemsize}"]
    for name, (kind, offset, *_) in dtype.fields.items():
        member = f"(({struct}*)0)->{name}"
        asserts += [f"__INTADDR__(&{member}) == {offset}", f"sizeof({member}) == {kind.itemsize}"]
    opening = f'#include "common/{header}.cuh"'
    check(tmp_path, opening, asserts)
    with pytest.raises(CompileError, match="static assertion failed"):
        check(tmp_path, opening, [f"sizeof({struct}) == {dtype.itemsize + 4}"])


EPILOGUES = ("EPILOGUE_GATE_UP", "EPILOGUE_ACTIVATION", "EPILOGUE_DOWN", "EPILOGUE_DOWN_FP32")


def test_the_numbers_of_the_epilogues_and_methods_are_the_kernels(tmp_path: Path) -> None:
    gemm = constants_of("common/gemm_args.cuh", "constexpr int kNoItem")
    epilogues = {name: getattr(kernels, name) for name in EPILOGUES}
    check(tmp_path, gemm, [f"{name} == {value}" for name, value in epilogues.items()])
    methods = [f"METHOD_{method.name} == {value}" for method, value in kernels.METHODS.items()]
    check(tmp_path, constants_of("route.cu", "struct Best"), methods)


def test_ranks_are_stored_in_the_blocks_that_the_shrink_reads(tmp_path: Path) -> None:
    sizes = {"kRankBlock": RANK_BLOCK, "kAStepBytes": RANK_BLOCK * 32 * 2, "kFragmentBytes": 16 * RANK_BLOCK * 2}
    check(tmp_path, '#include "common/lora.cuh"', [f"{name} == {size}" for name, size in sizes.items()])
