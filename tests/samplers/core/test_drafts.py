import math

import pytest
import torch

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import copied_draft, copied_slots, uniform_draft
from visual_spec.samplers.core.noise import CounterNoise

GRIDS = [
    TokenGrid(4, 5),
    TokenGrid(1, 7),
    TokenGrid(7, 1),
    TokenGrid(2, 3, frames=3),
    TokenGrid(1, 2, frames=4),
]


def walk(direction: str, slot: int, newest: int, grid: TokenGrid) -> int:
    """The definition, one neighbour at a time."""
    at = slot
    if direction == "left":
        while at > newest and (left := grid.left(at)) is not None:
            at = left
        if at <= newest:
            return at
        at = slot
    while at > newest and (up := grid.up(at)) is not None:
        at = up
    if at <= newest:
        return at
    at = slot
    while at > newest and (earlier := grid.previous_frame(at)) is not None:
        at = earlier
    return at if at <= newest else newest


@pytest.mark.parametrize("direction", ["left", "up"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_copies_the_nearest_slot_that_holds_a_token(grid, direction):
    for newest in range(grid.num_tokens - 1):
        slots = torch.arange(newest + 1, grid.num_tokens)[None]
        found = copied_slots(direction, slots, torch.tensor([[newest]]), grid)[0].tolist()
        assert found == [walk(direction, slot, newest, grid) for slot in slots[0].tolist()]


@pytest.mark.parametrize("direction", ["left", "up"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_slots_past_the_grid_copy_a_slot_that_exists(grid, direction):
    newest = torch.arange(grid.num_tokens + 3)[:, None]
    slots = newest + torch.arange(-2, 6)
    source = copied_slots(direction, slots.clamp(min=0), newest, grid)
    assert (source >= 0).all() and (source <= newest).all()


@pytest.mark.parametrize("direction", ["left", "up"])
def test_a_copy_is_labelled_as_a_point(direction):
    tokens = torch.tensor([[3, 1, 4, 1, 0, 0], [2, 0, 3, 4, 0, 0]])
    slots, newest = torch.tensor([[4, 5], [4, 5]]), torch.tensor([[3], [3]])
    like = torch.zeros(1, 1, 5, dtype=torch.float64)
    draft = copied_draft(direction, tokens, slots, newest, grid=TokenGrid(3, 3), law_like=like)
    assert draft.provenance == direction and draft.law is not None
    assert draft.law.shape == (2, 2, 5) and draft.law.dtype == torch.float64
    assert torch.equal(draft.law.exp(), torch.nn.functional.one_hot(draft.tokens, 5).double())
    expected = [[1, 1], [4, 4]] if direction == "left" else [[1, 4], [0, 3]]
    assert draft.tokens.tolist() == expected
    assert copied_draft(direction, tokens, slots, newest, grid=TokenGrid(3, 3), law_like=None).law is None


def test_uniform_draft_has_the_frequencies_of_its_label():
    noise = CounterNoise(torch.arange(3000), "cpu")
    slots = torch.arange(10).expand(3000, -1)
    like = torch.zeros(1, 1, 9)
    draft = uniform_draft(noise, slots, 4, allowed=(2, 8), law_like=like)
    assert draft.provenance == "uniform" and draft.law is not None
    assert draft.law.tolist() == pytest.approx([-math.inf] * 2 + [-math.log(6)] * 6 + [-math.inf])
    counts = torch.bincount(draft.tokens.flatten(), minlength=9)
    assert counts[:2].sum() == counts[8] == 0
    assert ((counts[2:8] - 5000).abs() < 4 * 65).all()  # standard deviation 65
    assert uniform_draft(noise, slots, 4, allowed=(2, 8), law_like=None).law is None
    again = uniform_draft(noise, slots, 5, allowed=(2, 8), law_like=None)
    assert not torch.equal(again.tokens, draft.tokens)
