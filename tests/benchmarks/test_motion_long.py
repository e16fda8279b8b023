"""Clips of any length, read frame by frame: true ones hold throughout, broken ones fail from the broken frame on."""

import numpy as np
import pytest

from benchmarks.motion_long import NAMES, consistency
from tests.helpers.refusals import refuses
from visual_spec.data.motion import Clip, MovingShape, caption, render

FRAMES = 40


def clip(speed: str = "steadily", ending: str = "bounces", **changes) -> Clip:
    look = {"shape": "star", "colour": "red", "size": "large"} | changes
    return Clip(
        (MovingShape(**look, x=16, y=32, direction="right", speed=speed, ending=ending),), "sky", "plain"
    )


def failing(answers: dict[str, np.ndarray]) -> set[str]:
    return {name for name in NAMES if not answers[name].all()}


@pytest.mark.parametrize("speed", ["slowly", "steadily", "quickly"])
@pytest.mark.parametrize("ending", ["bounces", "stops"])
def test_true_clips_hold_in_every_frame(speed, ending):
    true = clip(speed, ending)
    answers = consistency(caption(true), render(true, FRAMES))
    assert failing(answers) == set() and answers["all"].shape == (FRAMES,) and answers["all"].all()


def test_still_and_passing_shapes_hold():
    still = Clip((MovingShape("cross", "blue", "small", 24, 32),), "mint", "plain")
    other = MovingShape("circle", "green", "small", 40, 48)
    mover = MovingShape("square", "yellow", "small", 16, 16, "right", "quickly", "bounces")
    for true in (still, Clip((mover, other), "sand", "plain")):
        assert consistency(caption(true), render(true, FRAMES))["all"].all()


@pytest.mark.parametrize("name, changes", [("colour", {"colour": "blue"}), ("shape", {"shape": "circle"})])
def test_a_changed_look_fails_from_its_frame_on(name, changes):
    frames, changed = render(clip(), FRAMES), render(clip(**changes), FRAMES)
    frames[25:] = changed[25:]
    answers = consistency(caption(clip()), frames)
    assert failing(answers) == {name}
    assert answers["all"].tolist() == [True] * 25 + [False] * 15


def test_an_empty_frame_and_a_second_object_are_not_kept():
    frames = render(clip(), FRAMES)
    frames[10] = frames[10, 0, 0]  # the ground alone
    frames[20, 40:60, 40:60] = (235, 205, 60)  # a yellow patch beside the star
    answers = consistency(caption(clip()), frames)
    assert np.flatnonzero(~answers["kept"]).tolist() == [10, 20]
    assert np.flatnonzero(~answers["continuous"]).tolist() == [
        10,
        11,
    ]  # the one after it, too: it was not seen
    assert not answers["colour"][10] and answers["colour"][20]


def test_a_jump_is_one_frame_that_is_not_continuous():
    frames = render(clip(), FRAMES)
    frames = np.concatenate([frames[:16], frames[22:]])  # from the third step on its way to the fifth
    answers = consistency(caption(clip()), frames)
    assert np.flatnonzero(~answers["continuous"]).tolist() == [16]


def test_a_clip_that_freezes_stops_moving_and_one_that_should_be_still_must_not_move():
    frames = render(clip(), FRAMES)
    frames[12:] = frames[12]
    moving = consistency(caption(clip()), frames)["moving"]
    # Two of four steps are the least: those at frames 10 and 12 are in sight until frame 17.
    assert np.flatnonzero(~moving).tolist() == list(range(18, FRAMES))
    still = "a large red star stays still on a plain sky background, camera still"
    assert not consistency(still, render(clip(), FRAMES))["moving"][2:].any()


def test_what_is_no_clip_is_refused():
    refuses(ValueError, r"\(1, 64, 64, 3\)", consistency, caption(clip()), render(clip(), 1))
    refuses(ValueError, "'a dog'", consistency, "a dog", render(clip(), 2))
