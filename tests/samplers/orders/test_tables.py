"""Every order of the table: each slot once, nothing before it is there, and as many steps as the closed form says."""

import math

import pytest
import torch

from tests.helpers.refusals import refuses
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.orders.tables import (
    ORDERS,
    TokenOrder,
    blocks,
    diagonal,
    near_to_far,
    order_of,
    raster,
    regions,
)

GRIDS = [
    TokenGrid(4, 4),
    TokenGrid(6, 10),
    TokenGrid(10, 6),
    TokenGrid(12, 20),
    TokenGrid(3, 7),
    TokenGrid(5, 1),
    TokenGrid(1, 6),
    TokenGrid(1, 1),
    TokenGrid(3, 4, frames=3),
    TokenGrid(2, 2, frames=5),
]


def fits(name: str, grid: TokenGrid) -> bool:
    side = {"par4": 2, "par16": 4, "blocks2": 2, "blocks4": 4}.get(name)
    if side is None:
        return True
    return (grid.frames == 1 or "blocks" in name) and grid.height % side == grid.width % side == 0


CASES = [
    pytest.param(name, grid, id=f"{name}-{grid.frames}x{grid.height}x{grid.width}")
    for name in ORDERS
    for grid in GRIDS
    if fits(name, grid)
]


def check_availability(order: TokenOrder, grid: TokenGrid) -> None:
    """Walk through the steps, and know at each what was drawn, and whose token every place of the cache holds."""
    length = grid.num_tokens
    drawn: list[int] = []
    holds: dict[int, int] = {}
    for number, step in enumerate(order.steps):
        slots, sources = step.slots.tolist(), step.sources.tolist()
        assert len(set(slots)) == len(slots), "a slot is fed twice in one call"
        assert set(sources) <= {*drawn, *range(length, length + order.learned)}
        holds |= dict(zip(slots, sources, strict=True))
        assert step.seen.shape == (len(slots), length + order.learned)
        for seen in step.seen:
            assert all(holds.get(slot) == slot for slot in seen.nonzero()[:, 0].tolist())
        assert step.answers.shape == (len(step.emitted), len(order.heads))
        assert int(step.answers.max()) < max(len(slots), 1) and (step.answers >= 0).any(1).all()
        assert bool(len(slots)) == bool(number)
        drawn += step.emitted.tolist()
    assert sorted(drawn) == list(range(length))


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_each_slot_is_emitted_once_from_what_is_there(name, grid):
    order = order_of(name, grid)
    check_availability(order, grid)
    side = int(name[-1]) if "blocks" in name else 1
    first = [row * grid.width + column for row in range(side) for column in range(side)]
    assert order.steps[0].emitted.tolist() == first


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_the_number_of_steps_is_the_closed_form(name, grid):
    kind, number = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz") or 0)
    forms = {
        "raster": lambda: grid.num_tokens,
        "diagonal": lambda: grid.frames * grid.height + grid.width - 1,
        "nar": lambda: grid.frames + grid.height + grid.width - 2,
        "flashar": lambda: grid.frames + grid.height + grid.width - 2,
        "par": lambda: number + grid.num_tokens // number - 1,
        "blocks": lambda: grid.num_tokens // number**2,
    }
    assert len(order_of(name, grid).steps) == forms[kind]()


PUBLISHED = [
    ("raster", TokenGrid(16, 16), 256),
    ("nar", TokenGrid(16, 16), 31),
    ("nar", TokenGrid(16, 16, frames=4), 34),
    ("par4", TokenGrid(24, 24), 147),
    ("par16", TokenGrid(24, 24), 51),
    ("diagonal", TokenGrid(40, 64), 103),
    ("blocks2", TokenGrid(128, 128), 4096),  # 2048 pixels
]


@pytest.mark.parametrize(("name", "grid", "steps"), PUBLISHED)
def test_the_published_numbers_of_steps(name, grid, steps):
    assert len(order_of(name, grid).steps) == steps


def test_the_window_of_a_diagonal():
    assert len(diagonal(TokenGrid(90, 91), 7).steps) == 714  # Emu3, 8190 tokens in 713 published calls
    assert len(diagonal(TokenGrid(40, 64), 2).steps) == 142
    check_availability(diagonal(TokenGrid(5, 7), 3), TokenGrid(5, 7))
    # As far apart as a row is long, rows follow each other.
    for one, other in zip(diagonal(TokenGrid(3, 4), 9).steps, raster(TokenGrid(3, 4)).steps, strict=True):
        assert torch.equal(one.sources, other.sources) and torch.equal(one.emitted, other.emitted)
        own = one.slots[:, None] == torch.arange(12)
        assert torch.equal(one.seen | own, other.seen)


@pytest.mark.parametrize("grid", [TokenGrid(3, 5), TokenGrid(2, 3, frames=4)])
def test_near_to_far_is_told_by_distances(grid):
    """The definition of the paper, from coordinates: neighbours of one step less, masks by distance."""
    order = near_to_far(grid)
    assert len(order.heads) == (3 if grid.frames > 1 else 2)
    axes = [(0, 0, 1), (0, 1, 0), (1, 0, 0)][: len(order.heads)]
    slot_at = {grid.coordinates(slot): slot for slot in range(grid.num_tokens)}
    distance = {slot: sum(place) for place, slot in slot_at.items()}
    for number, step in enumerate(order.steps[1:], 1):
        assert {distance[slot] for slot in step.emitted.tolist()} == {number}
        for seen in step.seen.tolist():
            assert seen == [distance[slot] < number for slot in range(grid.num_tokens)]
        for slot, answers in zip(step.emitted.tolist(), step.answers.tolist(), strict=True):
            for axis, position in zip(axes, answers, strict=True):
                place = tuple(at - back for at, back in zip(grid.coordinates(slot), axis, strict=True))
                assert slot_at.get(place) == (None if position < 0 else int(step.slots[position]))


@pytest.mark.parametrize(
    ("grid", "count"), [(TokenGrid(4, 6), 4), (TokenGrid(8, 4), 16), (TokenGrid(6, 9), 9)]
)
def test_regions_are_told_by_the_reordered_sequence(grid, count):
    """The published sequence: a permuted grid, with the learned tokens after the first token of every region."""
    side, length = math.isqrt(count), grid.num_tokens
    slots = torch.arange(length).view(side, grid.height // side, side, grid.width // side)
    slots = slots.permute(1, 3, 0, 2).flatten().tolist()
    learned = list(range(length, length + count - 1))
    sequence = slots[:count] + learned + slots[count:]  # position p predicts slots[p + 1]
    # The first tokens but one alone, then groups of `count` positions.
    group = [p if p < count - 1 else count - 1 + (p - count + 1) // count for p in range(len(sequence))]
    order, position = regions(grid, count), 0
    for step in order.steps[1:]:
        for source, seen in zip(step.sources.tolist(), step.seen, strict=True):
            assert source == sequence[position]
            allowed = {sequence[other] for other in range(len(sequence)) if group[other] <= group[position]}
            assert set(seen.nonzero()[:, 0].tolist()) == allowed
            position += 1
        asked = [sequence.index(step.sources[place]) + 1 for place in step.answers[:, 0].tolist()]
        assert step.emitted.tolist() == [slots[at] for at in asked]
    assert position == len(sequence) - count  # the last group is not fed


@pytest.mark.parametrize(("grid", "side"), [(TokenGrid(4, 6), 2), (TokenGrid(4, 4, frames=2), 2)])
def test_blocks_are_told_by_coordinates(grid, side):
    """A step emits the slots of one block, and the same place of the block before answers."""

    def place(slot: int) -> tuple[int, int]:
        _, row, column = grid.coordinates(slot)
        return row % side, column % side

    def block(slot: int) -> int:
        frame, row, column = grid.coordinates(slot)
        return (frame * grid.height + row) // side * (grid.width // side) + column // side

    for number, step in enumerate(blocks(grid, side).steps[1:], 1):
        assert {block(slot) for slot in step.emitted.tolist()} == {number}
        for slot, [position] in zip(step.emitted.tolist(), step.answers.tolist(), strict=True):
            before = int(step.slots[position])
            assert place(before) == place(slot) and block(before) == number - 1
        for seen in step.seen.tolist():
            assert seen == [block(slot) < number for slot in range(grid.num_tokens)]


def test_joined_steps_are_one_pass():
    order = regions(TokenGrid(4, 4), 4)
    whole = order.joined()
    assert sorted(whole.slots.tolist()) == sorted({*range(19)} - {5, 7, 13, 15})  # the last group is not fed
    assert sorted(whole.emitted.tolist()) == list(range(1, 16))
    for step in order.steps[1:]:
        for slot, answers in zip(step.emitted.tolist(), step.answers, strict=True):
            at = whole.answers[whole.emitted.tolist().index(slot)]
            assert torch.equal(whole.slots[at], step.slots[answers])
    with pytest.raises(ValueError, match="slots twice"):
        diagonal(TokenGrid(3, 3)).joined()


@pytest.mark.parametrize(
    ("grid", "count"), [(TokenGrid(4, 4), 5), (TokenGrid(5, 4), 4), (TokenGrid(4, 4, frames=2), 4)]
)
def test_refuses_regions_that_do_not_fit(grid, count):
    refuses(ValueError, f"{count} regions.*square", regions, grid, count)


@pytest.mark.parametrize("grid", [TokenGrid(3, 4), TokenGrid(4, 6)])
def test_refuses_blocks_that_do_not_fit(grid):
    refuses(ValueError, "4 x 4.*4", blocks, grid, 4)


# -- planted bugs ----------------------------------------------------------------------------------------------------
