"""Tiled CPU arithmetic: right against float64, and the same bits wherever a row or an element stands."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import silu

from moelet.layer.tiles import ELEMENTS, ROW_TILE, elementwise, linear

# (N, K): LoRA ranks, a shared gate, odd widths, and sums long enough for a library to split.
SHAPES = [(1, 72), (3, 40), (3, 2048), (16, 100), (24, 600), (40, 72), (100, 257), (512, 2048), (2100, 300)]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def operands(rows: int, columns: int, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(columns * 10000 + terms)
    return torch.randn(rows, terms, generator=g), torch.randn(columns, terms, generator=g).bfloat16()


@pytest.mark.parametrize(("columns", "terms"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, ROW_TILE, 2 * ROW_TILE + 3])
def test_linear_is_the_product(rows: int, columns: int, terms: int) -> None:
    x, weight = operands(rows, columns, terms)
    truth = x.double() @ weight.double().T
    bound = x.double().abs() @ weight.double().abs().T * 1e-5  # far above fp32 sums, far below bf16
    assert bool(((linear(x, weight) - truth).abs() <= bound).all())


@pytest.mark.parametrize(("columns", "terms"), SHAPES)
def test_linear_gives_a_row_the_same_bits_at_every_place(columns: int, terms: int) -> None:
    x, weight = operands(2 * ROW_TILE, columns, terms)
    row = x[5].clone()
    alone = linear(row[None], weight)[0]
    for place in range(2 * ROW_TILE):
        among = x.clone()
        among[place] = row
        among[(place + 1) % len(x)] = torch.nan
        among[(place + 2) % len(x)] = torch.inf
        assert torch.equal(linear(among, weight)[place], alone)
        assert torch.equal(linear(among[: place + 1], weight)[place], alone)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("columns", "terms"), SHAPES)
def test_linear_gives_the_same_bits_on_any_number_of_threads(columns: int, terms: int) -> None:
    x, weight = operands(ROW_TILE + 1, columns, terms)
    torch.set_num_threads(1)
    one = linear(x, weight)
    for count in (2, 3):
        torch.set_num_threads(count)
        assert torch.equal(linear(x, weight), one)


def test_linear_reads_strided_weights_as_they_are() -> None:
    x, weight = operands(5, 64, 48)
    assert torch.equal(linear(x[:, :7], weight[:, :7]), linear(x[:, :7].contiguous(), weight[:, :7].contiguous()))


@pytest.mark.parametrize("function", [silu, torch.sigmoid])
def test_elementwise_gives_an_element_the_same_bits_at_every_place(function: object) -> None:
    assert callable(function)
    values = torch.randn(ELEMENTS + 37, generator=torch.Generator().manual_seed(1)) * 4
    whole = elementwise(function, values)
    torch.testing.assert_close(whole.double(), function(values.double()), rtol=1e-5, atol=1e-7)
    for place in [0, 1, 30, 31, 32, 63, ELEMENTS - 1, ELEMENTS, ELEMENTS + 36]:
        assert torch.equal(elementwise(function, values[place : place + 1]), whole[place : place + 1])
    assert torch.equal(elementwise(function, values[7:60]), whole[7:60])


def test_elementwise_keeps_shape_and_strided_input() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    assert torch.equal(elementwise(silu, x[:, 5:]), elementwise(silu, x)[:, 5:])
    assert elementwise(silu, x[:0]).shape == (0, 10)
