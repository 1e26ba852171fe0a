"""BlockMajorK against plain loops: every bit comes back, and every element lies where the formula says."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moelet.layer import layout
from moelet.layer.layout import PackedShape

SIZES = st.integers(1, 150)
TILES = st.sampled_from([32, 64, 128])


def every_bit_pattern(*shape: int, seed: int = 0) -> Tensor:
    """Random 16-bit words as bf16: NaNs with payloads, infinities, both zeros, subnormals."""
    words = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    words.view(-1)[:6] = torch.tensor([0x7F81, -0x7F, 0x7FFF, -1, -(2**15), 1], dtype=torch.int16)[: words.numel()]
    return words.view(torch.bfloat16)


def numbered(*shape: int) -> Tensor:
    """A tensor in which every element's word is its own index plus one, so that none equals padding."""
    count = torch.Size(shape).numel()
    assert count < 2**15
    return torch.arange(1, count + 1, dtype=torch.int16).view(shape).view(torch.bfloat16)


def words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.bfloat16 and torch.equal(words(a), words(b))


@settings(deadline=None)
@given(st.integers(1, 3), SIZES, SIZES, st.sampled_from([8, 32, 64, 128]), st.booleans())
def test_round_trip_is_bit_exact(experts: int, n: int, k: int, row_tile: int, swizzled: bool) -> None:
    w = every_bit_pattern(experts, n, k)
    packed = layout.block_major_k(w, row_tile=row_tile, swizzled=swizzled)
    assert packed.shape == (experts, -(-k // 64), -(-n // row_tile) * row_tile, 64)
    assert same_bits(layout.from_block_major_k(packed, n, k, swizzled=swizzled), w)


@settings(deadline=None)
@given(st.integers(1, 3), SIZES, SIZES, TILES, st.booleans())
def test_gate_up_round_trip_is_bit_exact(experts: int, inter: int, hidden: int, row_tile: int, swizzled: bool) -> None:
    w = every_bit_pattern(experts, 2 * inter, hidden)
    packed = layout.pack_gate_up(w, row_tile=row_tile, swizzled=swizzled)
    assert packed.shape == PackedShape(2 * inter, hidden, row_tile).shape(experts)
    assert same_bits(layout.unpack_gate_up(packed, inter, hidden, swizzled=swizzled), w)


@settings(deadline=None)
@given(st.integers(1, 3), SIZES, SIZES, TILES, st.booleans())
def test_down_round_trip_is_bit_exact(experts: int, hidden: int, inter: int, row_tile: int, swizzled: bool) -> None:
    w = every_bit_pattern(experts, hidden, inter)
    packed = layout.pack_down(w, row_tile=row_tile, swizzled=swizzled)
    assert packed.shape == PackedShape(hidden, inter, row_tile).shape(experts)
    assert same_bits(layout.unpack_down(packed, hidden, inter, swizzled=swizzled), w)


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("experts", "n", "k", "row_tile"), [(1, 1, 1, 8), (2, 37, 67, 32), (3, 24, 128, 8)])
def test_offset_formula_against_a_loop(experts: int, n: int, k: int, row_tile: int, swizzled: bool) -> None:
    w = numbered(experts, n, k)
    shape = PackedShape(n, k, row_tile)
    flat = words(layout.block_major_k(w, row_tile=row_tile, swizzled=swizzled)).flatten().tolist()
    expected = [0] * (shape.nbytes(experts) // 2)
    for e in range(experts):
        for row in range(n):
            for col in range(k):
                expected[shape.offset(e, row, col, swizzled=swizzled)] = int(words(w)[e, row, col])
    assert flat == expected


def test_offset_without_swizzle_by_hand() -> None:
    shape = PackedShape(70, 130)
    assert (shape.padded_n, shape.padded_k, shape.k_blocks) == (128, 192, 3)
    assert shape.nbytes(2) == 2 * 2 * 128 * 192
    assert shape.offset(1, 69, 129) == ((1 * 3 + 2) * 128 + 69) * 64 + 1
    assert shape.offset(0, 5, 17, swizzled=True) == 5 * 64 + (2 ^ 5) * 8 + 1


@pytest.mark.parametrize("pack", [layout.pack_gate_up, layout.pack_down])
def test_a_tile_of_rows_is_one_run_of_memory(pack: Callable[[Tensor], Tensor]) -> None:
    packed = pack(numbered(2, 64, 128))
    tile = packed[1, 1, 32:64]
    assert tile.is_contiguous()
    assert tile.storage_offset() == PackedShape(64, 128).offset(1, 32, 64)


@pytest.mark.parametrize("n", [8, 40])
def test_swizzle_against_a_loop(n: int) -> None:
    packed = numbered(2, 3, n, 64)
    swizzled = layout.swizzle_rows(packed)
    for row in range(n):
        for chunk in range(8):
            there = chunk ^ (row % 8)
            assert same_bits(
                swizzled[:, :, row, 8 * there : 8 * there + 8].contiguous(),
                packed[:, :, row, 8 * chunk : 8 * chunk + 8].contiguous(),
            )
    assert same_bits(layout.swizzle_rows(swizzled), packed)


# FlashInfer's table: row i of each 32 is stored at SHUFFLE_TABLE[i] (its blocks of 32 rows, epilogue tile 128).
SHUFFLE_TABLE = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27]
SHUFFLE_TABLE += [4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]


def shuffled(rows: list[int]) -> list[int]:
    stored = [-1] * len(rows)
    for r, row in enumerate(rows):
        stored[r - r % 32 + SHUFFLE_TABLE[r % 32]] = row
    return stored


@pytest.mark.parametrize("inter", [16, 32, 48, 768, 1, 15, 17, 100])
def test_gate_up_order_is_swap_interleave_shuffle(inter: int) -> None:
    padding = [-1] * (-inter % 16)
    gate = [*range(inter), *padding]
    up = [*range(inter, 2 * inter), *padding]
    swapped = up + gate
    half = len(swapped) // 2
    interleaved = [swapped[half * (r % 2) + r // 2] for r in range(2 * half)]
    assert layout.gate_up_row_order(inter).tolist() == shuffled(interleaved)


@pytest.mark.parametrize("hidden", [32, 64, 2048, 1, 31, 33, 100])
def test_down_order_is_the_shuffle_alone(hidden: int) -> None:
    assert layout.down_row_order(hidden).tolist() == shuffled([*range(hidden), *[-1] * (-hidden % 32)])


@settings(deadline=None)
@given(st.integers(1, 300), TILES)
def test_orders_and_stored_rows_invert_each_other(size: int, row_tile: int) -> None:
    for order, stored in (
        (layout.gate_up_row_order(size, row_tile=row_tile), layout.gate_up_stored_rows(size)),
        (layout.down_row_order(size, row_tile=row_tile), layout.down_stored_rows(size)),
    ):
        assert len(order) % row_tile == 0
        assert 0 <= len(order) - len(stored) < row_tile
        assert torch.equal(order[stored], torch.arange(len(stored)))
        assert int((order == -1).sum()) == len(order) - len(stored)


@pytest.mark.parametrize("inter", [16, 40, 96])
def test_packed_rows_lie_as_the_orders_say(inter: int) -> None:
    hidden = 70
    gate_up, down = numbered(2, 2 * inter, hidden), numbered(2, hidden, inter)
    for w, packed, order in (
        (gate_up, layout.pack_gate_up(gate_up), layout.gate_up_row_order(inter, row_tile=64)),
        (down, layout.pack_down(down), layout.down_row_order(hidden, row_tile=64)),
    ):
        by_row = layout.from_block_major_k(packed, packed.shape[2], w.shape[2])
        for n, source in enumerate(order.tolist()):
            expected = torch.zeros_like(w[:, 0]) if source < 0 else w[:, source]
            assert same_bits(by_row[:, n].contiguous(), expected.contiguous())


def test_a_lane_owns_up_and_gate_of_one_feature_and_adjacent_outputs_of_down() -> None:
    inter, hidden = 96, 160
    gate_up = layout.gate_up_row_order(inter).tolist()
    down = layout.down_row_order(hidden).tolist()
    for lane in range(32):
        first, second = lane // 4, lane // 4 + 8
        for m16 in range(0, 2 * inter, 16):
            assert gate_up[m16 + first] == gate_up[m16 + second] + inter
        for m16 in range(0, hidden, 16):
            assert down[m16 + second] == down[m16 + first] + 1
            assert down[m16 + first] % 2 == 0


@pytest.mark.parametrize("swizzled", [False, True])
def test_out_is_written_whole_padding_included(swizzled: bool) -> None:
    w = every_bit_pattern(3, 2 * 19, 65)
    dirty = torch.full(PackedShape(38, 65).shape(3), float("nan"), dtype=torch.bfloat16)
    packed = layout.pack_gate_up(w, swizzled=swizzled, out=dirty)
    assert packed is dirty
    assert same_bits(packed, layout.pack_gate_up(w, swizzled=swizzled))
    back = torch.full_like(w, float("nan"))
    assert layout.unpack_gate_up(packed, 19, 65, swizzled=swizzled, out=back) is back
    assert same_bits(back, w)


def test_padding_is_zero() -> None:
    packed = layout.pack_down(torch.ones(1, 40, 70, dtype=torch.bfloat16))
    assert packed.shape == (1, 2, 64, 64)
    assert int((words(packed) != 0).sum()) == 40 * 70


def test_experts_in_many_steps_equal_experts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    w = every_bit_pattern(7, 64, 70)
    at_once = layout.pack_gate_up(w, swizzled=True)
    monkeypatch.setattr(layout, "_STEP_NBYTES", 3 * PackedShape(64, 70).nbytes(1))
    assert same_bits(layout.pack_gate_up(w, swizzled=True), at_once)
    assert same_bits(layout.unpack_gate_up(at_once, 32, 70, swizzled=True), w)


@pytest.mark.gpu
@pytest.mark.parametrize("swizzled", [False, True])
def test_packing_onto_a_gpu_gives_the_same_bits(swizzled: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    w = every_bit_pattern(5, 2 * 24, 70)
    packed = layout.pack_gate_up(w, swizzled=swizzled)
    there = layout.pack_gate_up(w, swizzled=swizzled, out=torch.empty_like(packed, device="cuda"))
    assert same_bits(there.cpu(), packed)
    assert same_bits(layout.pack_gate_up(w.cuda(), swizzled=swizzled).cpu(), packed)
    assert same_bits(layout.unpack_gate_up(there, 24, 70, swizzled=swizzled).cpu(), w)


def test_weights_that_are_a_view_pack_as_their_copy() -> None:
    w = every_bit_pattern(130, 4, 33).permute(1, 2, 0)
    assert same_bits(layout.block_major_k(w), layout.block_major_k(w.contiguous()))


def test_wrong_inputs_are_named() -> None:
    bf16 = torch.zeros(1, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"bf16 with 3 dimensions, got torch\.float32"):
        layout.block_major_k(bf16.float())
    with pytest.raises(ValueError, match="even number of rows, got 63"):
        layout.pack_gate_up(bf16[:, :63])
    with pytest.raises(ValueError, match="row_tile must be a multiple of 32"):
        layout.pack_down(bf16, row_tile=8)
    with pytest.raises(ValueError, match="row_tile must be a multiple of 8"):
        layout.block_major_k(bf16, row_tile=12)
    with pytest.raises(ValueError, match=r"out should be bf16 \[1, 1, 64, 64\]"):
        layout.pack_down(bf16, out=bf16)
    with pytest.raises(ValueError, match="cannot have the shape"):
        layout.unpack_down(layout.pack_down(bf16), 64, 65)
    with pytest.raises(ValueError, match="too few"):
        layout.unpack_down(layout.block_major_k(bf16[:, :40], row_tile=8), 39, 64)
    with pytest.raises(ValueError, match="swizzling needs"):
        layout.swizzle_rows(bf16[:, :12])
    with pytest.raises(ValueError, match="at least one row"):
        PackedShape(0, 64)
