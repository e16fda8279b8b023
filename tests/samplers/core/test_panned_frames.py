"""One lag for all slots of a window: a camera that pans, a frame that stands, and the definition."""

import pytest
import torch

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import copied_slots, copied_tokens

GRID = TokenGrid(6, 6, 5)
SIZE = 36


def drafts(tokens: torch.Tensor, newest: int, count: int, direction: str = "panned_frame") -> torch.Tensor:
    """Drafts of the slots after `newest` of `tokens [180]`, of which the later ones are hidden."""
    known = torch.where(torch.arange(180) > newest, -5, tokens)[None]
    slots = torch.arange(newest + 1, newest + 1 + count)[None]
    return copied_tokens(direction, known, slots, torch.tensor([[newest]]), GRID)[0]


@pytest.mark.parametrize("step", [1, -1])
def test_a_window_follows_a_pan(step):
    """What enters at the border cannot be known; the second frame of the window has moved twice."""
    texture = torch.randint(50, (6, 30), generator=torch.Generator().manual_seed(2))
    frames = torch.stack([texture[:, 10 - step * frame : 16 - step * frame] for frame in range(5)])
    later = frames.flatten()[3 * SIZE :].view(2, 6, 6)
    made = drafts(frames.flatten(), 3 * SIZE - 1, 2 * SIZE).view(2, 6, 6)
    seen = slice(1, 6) if step > 0 else slice(0, 5)
    twice = slice(2, 6) if step > 0 else slice(0, 4)
    assert torch.equal(made[0, :, seen], later[0, :, seen]) and torch.equal(
        made[1, :, twice], later[1, :, twice]
    )
    still = drafts(frames.flatten(), 3 * SIZE - 1, SIZE, "previous_frame").view(6, 6)
    assert (still == later[0]).float().mean() < 0.2


@pytest.mark.parametrize("step", [1, -1])
def test_a_pattern_of_three_tokens_is_known_at_the_border_too(step):
    stripes = torch.arange(30) % 3 == 0
    rows = [stripes[12 - step * frame : 18 - step * frame].repeat(6) for frame in range(5)]
    tokens = torch.cat(rows).long()
    assert torch.equal(drafts(tokens, 4 * SIZE - 1, SIZE), tokens[4 * SIZE :])


def test_a_frame_that_stands_is_not_moved_by_chance():
    """An even ground agrees with every lag, and a small shape that moves agrees a little more with one."""
    tokens = torch.zeros(5, 6, 6, dtype=torch.long)
    tokens[torch.arange(5), 2, torch.arange(5)] = 1
    flat = tokens.flatten()
    assert torch.equal(drafts(flat, 4 * SIZE - 1, SIZE), flat[3 * SIZE : 4 * SIZE])


def plain_slot(tokens: list[int], slot: int, first: int, newest: int, grid: TokenGrid) -> int | None:
    """The definition, one comparison after the other; None: as the frame before."""
    size = grid.height * grid.width
    best, most = size, None
    for lag in (size, max(size - 1, 1), size + 1, 3 * size):
        hits = size // 8 if lag == size else 0
        for place in range(min(first - 1, newest), min(first - 1, newest) - size, -1):
            hits += place - lag >= 0 and tokens[place] == tokens[place - lag]
        if most is None or hits > most:
            best, most = lag, hits
    while slot > newest:
        slot -= best
    return None if best == size or slot < 0 else slot


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 2, 4), (2, 2, 5), (3, 1, 4), (6, 6, 4), (4, 7, 3)])
def test_slots_are_those_of_the_definition(shape):
    """Also where the window begins before the newest token, as in Jacobi decoding."""
    grid, generator = TokenGrid(*shape), torch.Generator().manual_seed(3)
    count = grid.num_tokens
    tokens = torch.randint(2, (40, count), generator=generator)
    newest = torch.randint(count - 1, (40, 1), generator=generator)
    first = (newest + 1 - torch.randint(3, (40, 1), generator=generator)).clamp(min=1)
    slots = (first + torch.arange(8)).clamp(max=count - 1)
    made = copied_slots("panned_frame", slots, newest, grid, tokens)
    still = copied_slots("previous_frame", slots, newest, grid)
    moved = 0
    for row in range(40):
        for place, slot in enumerate(slots[row].tolist()):
            if slot > newest[row]:
                at = plain_slot(tokens[row].tolist(), slot, int(first[row]), int(newest[row]), grid)
                moved += at is not None
                assert made[row, place] == (still[row, place] if at is None else at)
    assert moved
    later = torch.arange(count) > newest
    other = torch.where(later, 1 - tokens, tokens)
    assert torch.equal(made, copied_slots("panned_frame", slots, newest, grid, other))


def test_pictures_are_copied_from_the_left():
    tokens = torch.randint(9, (1, 36), generator=torch.Generator().manual_seed(0))
    slots, newest = torch.arange(8, 20)[None], torch.tensor([[7]])
    made, left = (
        copied_slots(name, slots, newest, TokenGrid(6, 6), tokens) for name in ("panned_frame", "left")
    )
    assert torch.equal(made, left)
