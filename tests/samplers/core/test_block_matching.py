"""Where the content of a slot was in the last complete frame."""

import pytest
import torch

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import copied_slots, copied_tokens, moved_slots

GRID = TokenGrid(6, 6, 5)
SIZE = 36


def scene(step: tuple[int, int], start: tuple[int, int] = (2, 1)) -> torch.Tensor:
    """A shape of 2 x 2 different tokens that moves by `step` a frame over a background of tokens 0: [1, 180]."""
    frames = torch.zeros(5, 6, 6, dtype=torch.long)
    for frame in range(5):
        y, x = start[0] + frame * step[0], start[1] + frame * step[1]
        for dy in (0, 1):
            for dx in (0, 1):
                if 0 <= y + dy < 6 and 0 <= x + dx < 6:
                    frames[frame, y + dy, x + dx] = 1 + 2 * dy + dx
    return frames.view(1, -1)


def drafts(direction: str, tokens: torch.Tensor, newest: int, count: int = SIZE) -> torch.Tensor:
    """Drafts of the slots after `newest`, from tokens of which the later ones are hidden."""
    known = tokens.clone()
    known[:, newest + 1 :] = -5
    slots = torch.arange(newest + 1, newest + 1 + count)[None]
    return copied_tokens(direction, known, slots, torch.tensor([[newest]]), GRID)[0]


@pytest.mark.parametrize("step", [(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (0, 0)])
def test_steady_motion_is_drafted_right(step):
    start = (2 if step[0] == 0 else 1 if step[0] > 0 else 4, 2 if step[1] == 0 else 1 if step[1] > 0 else 4)
    tokens = scene(step, start)
    expected = tokens[0, 3 * SIZE : 4 * SIZE]
    assert torch.equal(drafts("moved_frame", tokens, 3 * SIZE - 1), expected)
    if step != (0, 0):  # and the frame before does not do
        assert not torch.equal(drafts("previous_frame", tokens, 3 * SIZE - 1), expected)


def test_a_second_frame_ahead_moves_twice():
    """Everything slides to the right by a token a frame; what enters on the left cannot be known."""
    texture = torch.randint(50, (6, 30), generator=torch.Generator().manual_seed(2))
    frames = torch.stack([texture[:, 10 - frame : 16 - frame] for frame in range(5)])
    found = drafts("moved_frame", frames.view(1, -1), 2 * SIZE - 1, 2 * SIZE).view(2, 6, 6)
    assert torch.equal(found[0, :, 1:], frames[2, :, 1:])
    assert torch.equal(found[1, :, 2:], frames[3, :, 2:])


def test_the_part_of_the_next_frame_that_is_there_tells_of_a_stop():
    tokens = scene((0, 1), (2, 0)).view(5, 6, 6)
    tokens[3] = tokens[2]  # it stops
    tokens = tokens.view(1, -1)
    newest = 3 * SIZE + 2 * 6 + 5  # the upper row of the shape is known
    expected = tokens[0, newest + 1 : newest + 1 + 6]
    assert torch.equal(drafts("moved_frame", tokens, newest, 6), expected)


def test_early_slots_and_single_frames_are_copied_without_motion():
    tokens = torch.randint(9, (1, 180), generator=torch.Generator().manual_seed(0))
    for newest in (0, 5, SIZE - 1, 2 * SIZE - 2):
        assert torch.equal(
            drafts("moved_frame", tokens, newest, 8), drafts("previous_frame", tokens, newest, 8)
        )
    flat = TokenGrid(6, 6)
    slots, newest = torch.arange(8, 20)[None], torch.tensor([[7]])
    for direction in ("previous_frame", "moved_frame"):
        found = copied_tokens(direction, tokens[:, :36], slots, newest, flat)
        assert torch.equal(found, copied_tokens("left", tokens[:, :36], slots, newest, flat))


def test_the_place_depends_on_known_tokens_only():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, (4, 180), generator=generator)
    newest = torch.tensor([[75], [100], [143], [150]])
    slots = newest + torch.arange(1, 25)
    found = moved_slots(tokens, slots, newest, GRID)
    assert (found <= newest).all() and (found >= 0).all()
    later = torch.arange(180)[None] > newest
    other = torch.where(later, torch.randint(3, (4, 180), generator=generator), tokens)
    assert torch.equal(found, moved_slots(other, slots, newest, GRID))


def test_previous_frame_looks_at_the_same_place():
    slots, newest = torch.arange(100, 180)[None], torch.tensor([[99]])
    found = copied_slots("previous_frame", slots, newest, GRID)[0].tolist()
    for slot, source in zip(range(100, 180), found, strict=True):
        assert source <= 99 and (slot - source) % SIZE == 0 and source + SIZE > 99


def plain_place(tokens: list[int], slot: int, newest: int, grid: TokenGrid) -> int:
    """The definition, one comparison after the other."""
    size = grid.height * grid.width
    last = (newest + 1) // size - 1

    def at(frame: int, row: int, column: int) -> int | None:
        place = frame * size + row * grid.width + column
        inside = 0 <= row < grid.height and 0 <= column < grid.width
        return tokens[place] if inside and place <= newest else None

    scores = []
    reach = range(-2, 3)
    steps = sorted(((y, x) for y in reach for x in reach), key=lambda step: step[0] ** 2 + step[1] ** 2)
    for number, (down, right) in enumerate(steps):
        ahead = slot // size - last
        row, column = slot % size // grid.width - ahead * down, slot % grid.width - ahead * right
        if at(last, row, column) is None:
            continue
        score = 0
        for frame, weight in ((last, 1), (last + 1, 4)):
            passed = frame - last
            for y in range(row + passed * down - 1, row + passed * down + 2):
                for x in range(column + passed * right - 1, column + passed * right + 2):
                    later, earlier = at(frame, y, x), at(frame - 1, y - down, x - right)
                    if later is not None and earlier is not None:
                        score += weight * (1 if later == earlier else -2)
        scores.append((score, -number, last * size + row * grid.width + column))
    return max(scores)[2]


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 2, 4), (2, 2, 3), (3, 1, 4), (6, 6, 4), (4, 7, 3)])
def test_places_are_those_of_the_definition(shape):
    """Also where frames are smaller than the reach of displacements, and tokens of the last frame are missing."""
    grid, generator = TokenGrid(*shape), torch.Generator().manual_seed(3)
    count, first = shape[0] * shape[1] * shape[2], 2 * shape[0] * shape[1] - 1
    tokens = torch.randint(2, (12, count), generator=generator)
    newest = torch.randint(first, count - 1, (12, 1), generator=generator)
    slots = newest + 1 + torch.arange(5)
    slots = torch.where(slots < count, slots, newest + 1)
    places = moved_slots(tokens, slots, newest, grid)
    for row in range(12):
        for slot, place in zip(slots[row].tolist(), places[row].tolist(), strict=True):
            assert place == plain_place(tokens[row].tolist(), slot, int(newest[row]), grid)
