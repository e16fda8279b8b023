"""Clips by class: their tokens are squares of small frames, and the parser reads what the class says."""

import numpy as np
import torch

from scripts.train.clips import (
    CLIP_CLASSES,
    class_of_clip,
    clip_pixels,
    encoded_clips,
    judged_clips,
    moving_clips,
    score_clip,
    tokens_of,
)
from scripts.train.motion_small import small_frames
from visual_spec.data.motion import Clip, MovingShape, caption, is_held_out, render

STAR = MovingShape("star", "red", "large", 16, 32, "right", "quickly", "bounces")
RED_RIGHT = CLIP_CLASSES.index(("red", "right"))


def test_a_token_is_a_square_of_a_small_frame():
    small = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    tokens = tokens_of(small)
    assert tokens.shape == (32, 48)
    for frame, down, right in ((0, 0, 0), (0, 1, 3), (1, 2, 1)):
        token = tokens[16 * frame + 4 * down + right].view(4, 4, 3)
        for y, x, colour in ((0, 0, 0), (1, 2, 1), (3, 0, 2)):
            assert token[y, x, colour] == 2 * small[colour, frame, 4 * down + y, 4 * right + x]


def test_pixels_are_the_small_frames_made_large():
    small = small_frames(Clip((STAR,), "sky", "plain"), 0, 3)
    pixels = torch.from_numpy(clip_pixels(tokens_of(small)[None])[0]).double() / 127.5 - 1
    assert pixels.shape == (3, 64, 64, 3)
    plain = small[:, :, 15, 15]  # of the ground; cubic interpolation keeps what is even
    assert (pixels[:, 62, 62] - plain.T).abs().max() < 0.01
    means = pixels.unflatten(2, (16, 4)).unflatten(1, (16, 4)).mean((2, 4)).permute(3, 0, 1, 2)
    assert (means - small).abs().mean() < 0.02


def test_the_parser_reads_the_class_of_a_true_clip():
    pixels = render(Clip((STAR,), "sky", "plain"), 8)
    assert all(score_clip(RED_RIGHT, pixels).values())
    small = tokens_of(small_frames(Clip((STAR,), "sky", "plain"), 0, 8))[None]
    assert all(score_clip(RED_RIGHT, clip_pixels(small)[0]).values())
    wrong = score_clip(CLIP_CLASSES.index(("blue", "left")), pixels)
    assert wrong == {"one_object": True, "colour": False, "direction": False, "kept": True, "ground": True}
    still = MovingShape("cross", "blue", "small", 48, 48)
    two = score_clip(RED_RIGHT, render(Clip((MovingShape(*vars(STAR).values()), still), "sky", "striped"), 8))
    assert two == {"one_object": False, "colour": True, "direction": True, "kept": True, "ground": False}
    empty = score_clip(RED_RIGHT, np.full((8, 64, 64, 3), 128, np.uint8))
    assert not any(empty[key] for key in ("one_object", "colour", "direction", "kept"))
    changed = np.concatenate([pixels[:4], render(Clip((still,), "sky", "plain"), 4)])
    assert not score_clip(RED_RIGHT, changed)["kept"]


def test_clips_of_training_move_and_are_not_held_out():
    clips, held = moving_clips(30, 3), moving_clips(10, 3, held_out=True)
    assert len(clips) == 30 and {class_of_clip(clip) for clip in clips} <= set(range(32))
    assert not any(is_held_out(caption(clip)) for clip in clips)
    assert all(is_held_out(caption(clip)) for clip in held)
    encoded = encoded_clips(30, 3, 4)
    assert encoded.means.shape == (30, 64, 48) and not encoded.stds.any()
    for index in (0, 7):
        clip, small = clips[index], small_frames(clips[index], 0, 4)
        assert CLIP_CLASSES[encoded.labels[index]] == (clip.objects[0].colour, clip.objects[0].direction)
        for slot in range(64):
            frame, down, right = slot // 16, slot % 16 // 4, slot % 4
            square = small[:, frame, 4 * down : 4 * down + 4, 4 * right : 4 * right + 4]
            shown = (square - small[:, 0, :1, :1]).abs().max() > 0.1
            assert encoded.objects[index, slot] == shown


def test_true_clips_are_judged_right():
    waiting: dict[int, list[torch.Tensor]] = {}
    for clip in moving_clips(600, 1):
        waiting.setdefault(class_of_clip(clip), []).append(tokens_of(small_frames(clip, 0, 8)))

    def drawn(labels: torch.Tensor, seed: int) -> torch.Tensor:
        return torch.stack([waiting[label].pop() for label in labels.tolist()])

    read = judged_clips(8, drawn)
    right = dict.fromkeys(("one_object", "colour", "direction", "kept", "ground", "class"), 1)
    assert read == {"clips": 8, **right}
