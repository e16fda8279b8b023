import math

import pytest
import torch

from visual_spec.kernels.law import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import (
    Draft,
    Label,
    copied_slots,
    copied_tokens,
    rows_of,
    uniform_tokens,
    with_bonus,
)
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
    if direction == "previous_frame":
        while at > newest and (earlier := grid.previous_frame(at)) is not None:
            at = earlier
        if at <= newest:
            return at
        at = slot
    if direction != "up":
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


@pytest.mark.parametrize("direction", ["left", "up", "previous_frame"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_copies_the_nearest_slot_that_holds_a_token(grid, direction):
    for newest in range(grid.num_tokens - 1):
        slots = torch.arange(newest + 1, grid.num_tokens)[None]
        found = copied_slots(direction, slots, torch.tensor([[newest]]), grid)[0].tolist()
        assert found == [walk(direction, slot, newest, grid) for slot in slots[0].tolist()]


@pytest.mark.parametrize("direction", ["left", "up", "previous_frame"])
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
    copies = copied_tokens(direction, tokens, slots, newest, TokenGrid(3, 3))
    expected = [[1, 1], [4, 4]] if direction == "left" else [[1, 4], [0, 3]]
    assert copies.tolist() == expected
    draft = Draft.points(copies, 5, direction)
    assert draft.provenance == direction and draft.label is not None and torch.equal(draft.tokens, copies)
    law = draft.label.dense(draft.tokens)
    assert law.shape == (2, 2, 5)
    assert torch.equal(law.exp(), torch.nn.functional.one_hot(draft.tokens, 5).float())


def test_uniform_draft_has_the_frequencies_of_its_label():
    noise = CounterNoise(torch.arange(3000), "cpu")
    slots = torch.arange(10).expand(3000, -1)
    tokens = uniform_tokens(noise, slots, 4, allowed=(2, 8))
    label = Label(torch.zeros(3000, 1, 9), torch.full_like(tokens, UNIFORM_LAW), (2, 8))
    law = label.dense(tokens)
    assert law.shape == (3000, 10, 9) and torch.equal(law, law[:1, :1].expand_as(law))
    assert law[0, 0].tolist() == pytest.approx([-math.inf] * 2 + [-math.log(6)] * 6 + [-math.inf])
    counts = torch.bincount(tokens.flatten(), minlength=9)
    assert counts[:2].sum() == counts[8] == 0
    assert ((counts[2:8] - 5000).abs() < 4 * 65).all()  # standard deviation 65
    assert not torch.equal(uniform_tokens(noise, slots, 5, allowed=(2, 8)), tokens)


# -- labels ------------------------------------------------------------------------------------------------------------


def random_label(rows: list[list[int]], dtype: torch.dtype = torch.float64) -> Label:
    """Three stored laws a sample, over 5 ids of which 1 to 3 are allowed."""
    laws = torch.randn(len(rows), 3, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return Label(laws.log_softmax(-1), torch.tensor(rows), (1, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_label_gives_every_draft_the_law_it_names(dtype):
    rows = [[2, POINT_LAW, NO_DRAFT, 0], [UNIFORM_LAW, 1, POINT_LAW, NO_DRAFT]]
    tokens = [[4, 0, -1, 2], [3, 3, 4, -1]]
    label = random_label(rows, dtype)
    dense = label.dense(torch.tensor(tokens))
    assert dense.shape == (2, 4, 5) and dense.dtype == dtype
    for sample in range(2):
        for place, (row, token) in enumerate(zip(rows[sample], tokens[sample], strict=True)):
            if row >= 0:
                expected = label.laws[sample, row].tolist()
            elif row == POINT_LAW:
                expected = [0.0 if id == token else -math.inf for id in range(5)]
            elif row == UNIFORM_LAW:
                expected = [-math.log(3) if 1 <= id < 4 else -math.inf for id in range(5)]
            else:
                expected = [-math.inf] * 5
            assert dense[sample, place].tolist() == pytest.approx(expected)


def test_a_dense_label_shares_no_memory_with_the_stored_laws():
    label = random_label([[0, 1, POINT_LAW]])
    before = label.laws.clone()
    label.dense(torch.tensor([[0, 1, 2]])).fill_(7.0)
    assert torch.equal(label.laws, before)


def test_labels_and_drafts_of_some_samples_and_positions():
    label = random_label([[0, 1, 2], [POINT_LAW, 2, 0], [UNIFORM_LAW, NO_DRAFT, 1]])
    tokens = torch.tensor([[0, 1, 2], [3, 4, 0], [1, -1, 3]])
    draft = Draft(tokens, label, "test")
    rest = draft.after(1)
    assert rest.label is not None and rest.provenance == "test"
    assert torch.equal(rest.tokens, tokens[:, 1:])
    assert torch.equal(rest.label.dense(rest.tokens), label.dense(tokens)[:, 1:])
    assert Draft(tokens, None, "test").after(2).label is None
    whole = label.dense(tokens)
    label.select(torch.tensor([2, 0]))
    assert torch.equal(label.dense(tokens[[2, 0]]), whole[[2, 0]])


def test_points_say_where_there_is_no_draft():
    draft = Draft.points(torch.tensor([[2, -1], [-1, 0]]), 3, "copy")
    assert draft.label is not None
    found = draft.label.dense(draft.tokens).exp().tolist()
    assert found == [[[0, 0, 1], [0, 0, 0]], [[0, 0, 0], [1, 0, 0]]]


@pytest.mark.parametrize("group", [1, 3])
def test_the_bonus_position_has_no_draft(group):
    label = random_label([[0, 1, 2], [POINT_LAW, 2, 0]])
    draft = Draft(torch.tensor([[0, 1, 2], [3, 4, 0]]), label, "test")
    longer = with_bonus(draft, group)
    assert longer.label is not None and longer.tokens.shape == (2, 3 + group)
    assert torch.equal(longer.tokens[:, :3], draft.tokens) and (longer.tokens[:, 3:] == -1).all()
    dense = longer.label.dense(longer.tokens)
    assert torch.equal(dense[:, :3], label.dense(draft.tokens)) and dense[:, 3:].isneginf().all()
    assert with_bonus(Draft(draft.tokens, None, "test"), group).label is None


def test_rows_of_takes_whole_rows():
    values = torch.randn(2, 3, 4)
    rows = torch.tensor([[2, 2, 0, 1], [0, 1, 1, 2]])
    found = rows_of(values, rows)
    for sample in range(2):
        for place in range(4):
            assert torch.equal(found[sample, place], values[sample, rows[sample, place]])
