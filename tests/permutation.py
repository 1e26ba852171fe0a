"""What the sort kernel should make of a batch, by plain loops over its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moelet.graphs.arena import Arena
from moelet.graphs.geometry import ROW_ALIGN, Geometry
from moelet.layer.layout import round_up


@dataclass
class Permutation:
    """``places`` by slot row, -1 without a local expert; ``row_slots`` by place; tiles are (expert, first row, rows,
    groups), groups (expert, slot, first row, rows); ``num_rows`` counts padding.

    The groups of a tile are those of its expert: the first in the low half, how many in the high half.
    """

    places: list[int]
    row_slots: dict[int, int] = field(default_factory=dict)
    tiles: list[tuple[int, int, int, int]] = field(default_factory=list)
    groups: list[tuple[int, int, int, int]] = field(default_factory=list)
    num_rows: int = 0


def permutation(
    geometry: Geometry,
    ids: Sequence[Sequence[int]],
    slots: Sequence[int] | None,
    tile: int,
    group_rows: int,
    *,
    balanced: bool = False,
) -> Permutation:
    """Rows sorted by (expert, slot), those of equal key in their own order, every expert on a multiple of 8 rows.

    ``ids`` are global expert ids of each token's ``top_k`` choices; ``slots`` None: a program without LoRA; groups have
    ``group_rows`` at the most; ``balanced``: an expert's tiles are of about equal size, and its groups whole, as wide
    GEMMs have them.
    """
    token_slots = [-1] * len(ids) if slots is None else list(slots)
    rows = [
        (expert_of(geometry, ids[token], choice), token_slots[token], token * geometry.choices + choice)
        for token in range(len(ids))
        for choice in range(geometry.choices)
    ]
    found = Permutation([-1] * len(rows))
    for expert in range(geometry.experts):
        mine = [(slot, row) for local, slot, row in rows if local == expert]
        for position, (slot, row) in enumerate(sorted(mine)):
            found.places[row] = found.num_rows + position
            found.row_slots[found.num_rows + position] = slot
        first, first_group = found.num_rows, len(found.groups)
        for slot in sorted({slot for slot, _ in mine}):
            count = sum(other == slot for other, _ in mine)
            if slot >= 0:
                most = max(count, 1) if balanced else group_rows
                parts = range(0, count, most)
                found.groups += [(expert, slot, first + start, min(most, count - start)) for start in parts]
            first += count
        listed = first_group | (len(found.groups) - first_group) << 16
        step = balanced_step(len(mine), tile) if balanced else tile
        for start in range(0, len(mine), step):
            found.tiles.append((expert, found.num_rows + start, min(step, len(mine) - start), listed))
        found.num_rows += -(-len(mine) // ROW_ALIGN) * ROW_ALIGN
    return found


def assert_made(arena: Arena, made: Permutation, slot_rows: int, *, lora: bool) -> None:
    """A sort of ``slot_rows`` rows at the most left these places, tiles and, with ``lora``, adapter groups."""
    assert arena.read("places").tolist() == made.places + [-1] * (slot_rows - len(made.places))
    _assert_listed(arena, "tiles", made.tiles)
    assert arena.read("tickets").tolist() == [0, 0]
    if lora:
        _assert_listed(arena, "groups", made.groups)


def _assert_listed(arena: Arena, name: str, expected: Sequence[tuple[int, ...]]) -> None:
    assert arena.read(f"num_{name}").tolist() == [len(expected)]
    assert arena.read(name)[: len(expected)].tolist() == [list(one) for one in expected]


def balanced_step(count: int, tile: int) -> int:
    """Rows of each tile but the last where ``count`` rows make as few tiles as they can."""
    tiles = max(-(-count // tile), 1)
    return max(round_up(-(-count // tiles), ROW_ALIGN), ROW_ALIGN)


def expert_of(geometry: Geometry, ids: Sequence[int], choice: int) -> int | None:
    """The expert of one choice as the weight tensors number them: local ones, then the shared chunks."""
    if choice >= geometry.top_k:
        return geometry.num_local_experts + choice - geometry.top_k
    local = ids[choice] - geometry.local_expert_offset
    return local if 0 <= local < geometry.num_local_experts and ids[choice] >= 0 else None
