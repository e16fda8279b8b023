"""The clips of `motion`: their paths, captions and pixels."""

import numpy as np
import pytest

from visual_spec.data.motion import (
    LANES,
    PLACES,
    SPEEDS,
    Clip,
    MovingShape,
    can_step,
    caption,
    held_out_prompts,
    is_held_out,
    path,
    render,
    sample_clip,
    sample_clips,
)
from visual_spec.data.motion_parser import parse_caption
from visual_spec.data.shapes import BACKGROUND_COLOURS, OBJECT_COLOURS

STAR = MovingShape("star", "red", "small", 32, 16, "right", "steadily", "bounces")


def test_a_shape_that_bounces_turns_back_and_one_that_stops_stays():
    steps = [32, 32, 40, 40, 48, 48, 40, 40, 32, 32, 24, 24, 16, 16, 24, 24]
    assert path((32, 16), "right", "steadily", "bounces").tolist() == [[x, 16] for x in steps]
    stopped = [32, 24, 16, 16, 16]
    assert path((48, 32), "up", "quickly", "stops", 5).tolist() == [[48, y] for y in stopped]
    assert path((24, 40), None, None, None, 3).tolist() == [[24, 40]] * 3


def test_every_sampled_clip_shows_what_its_caption_says():
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(400):
        clip = sample_clip(rng)
        mover = clip.objects[0]
        points = mover.path()
        kinds.add((mover.direction is None, len(clip.objects), clip.camera))
        assert points.min() >= PLACES[0] and points.max() <= PLACES[-1]
        if mover.direction is not None:
            assert mover.speed is not None
            assert can_step((mover.x, mover.y), mover.direction)
            # The border is reached at least one step before the last.
            axis = 0 if mover.direction in ("left", "right") else 1
            border = PLACES[-1] if mover.direction in ("right", "down") else PLACES[0]
            reached = int((points[:, axis] == border).argmax())
            assert 0 < reached <= 15 // SPEEDS[mover.speed] * SPEEDS[mover.speed] - SPEEDS[mover.speed]
        if len(clip.objects) == 2:
            other = clip.objects[1]
            assert other.colour != mover.colour and {mover.size, other.size} == {"small"}
            lanes = {mover.x, other.x} if mover.direction in ("up", "down") else {mover.y, other.y}
            assert lanes == set(LANES)  # they pass each other without touching
        assert clip.camera == "still" or clip.texture == "striped"
        facts = parse_caption(caption(clip))
        assert (facts.background, facts.texture, facts.camera) == (clip.background, clip.texture, clip.camera)
        wanted = [(o.shape, o.colour, o.size, o.direction, o.speed, o.ending) for o in clip.objects]
        assert [(o.shape, o.colour, o.size, o.direction, o.speed, o.ending) for o in facts.objects] == wanted
    assert len(kinds) == 9  # moving alone, in a pair, and still, each with three cameras


def test_held_out_captions_are_apart_from_trained_ones():
    trained = {caption(clip) for clip in sample_clips(200, seed=1)}
    prompts = held_out_prompts(50, seed=2)
    assert all(is_held_out(text) for text in prompts) and not trained & set(prompts)
    assert prompts == held_out_prompts(50, seed=2)


def test_the_pixels_are_those_of_the_scene():
    clip = Clip((STAR,), "sky", "striped", "pans right")
    frames = render(clip)
    assert frames.shape == (16, 64, 64, 3) and frames.dtype == np.uint8
    for frame, (x, y) in enumerate(STAR.path()):
        assert np.abs(frames[frame, y, x].astype(int) - OBJECT_COLOURS["red"]).max() <= 3
        # Far below the star: the dark column of tokens moves one token to the left a frame.
        row = frames[frame, 60].astype(int)
        dark = [column for column in range(8) if row[8 * column + 4, 0] < BACKGROUND_COLOURS["sky"][0] - 9]
        assert dark == [column for column in range(8) if (column + frame) % 3 == 0]
    still = render(Clip((MovingShape("circle", "blue", "large", 32, 32),), "mint", "plain"))
    assert (still == still[0]).all()


def test_an_unknown_shape_is_named():
    with pytest.raises(ValueError, match="hexagon"):
        render(Clip((MovingShape("hexagon", "red", "small", 32, 32),), "sky", "plain"), 1)
