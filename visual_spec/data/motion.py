"""`motion`: procedural captioned clips of moving shapes, 16 frames of 64 x 64 pixels, with exact ground truth.

A clip shows a shape that moves along a row or a column at one of three speeds, turns back or stops at the border, and
may pass a second shape that stays still. The background is plain or striped; a striped one slides if the camera pans.
The caption states all of this. Directions are those in the picture.

Colours, shapes and painting are as in `visual_spec.data.shapes`. Positions are multiples of 8 pixels, one token of
its tokenizer, and everything moves by whole tokens: a shape at a later place has the same tokens as before, and what
does not move keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visual_spec.data.shapes import BACKGROUND_COLOURS, CELL, OBJECT_COLOURS, SHAPES, paint_shape
from visual_spec.data.splits import is_held_out, sample_part

FRAME_SIZE = 64
NUM_FRAMES = 16
SIZES: dict[str, int] = {"small": 14, "large": 20}  # radius in pixels
DIRECTIONS: dict[str, tuple[int, int]] = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
SPEEDS: dict[str, int] = {"slowly": 4, "steadily": 2, "quickly": 1}  # frames per step of one token
ENDINGS: dict[str, str] = {"bounces": "turns back at the border", "stops": "stays at the border"}
TEXTURES = ("plain", "striped")
CAMERAS: dict[str, int] = {
    "still": 0,
    "pans left": 1,
    "pans right": -1,
}  # tokens that the background moves a frame
PLACES = (16, 24, 32, 40, 48)  # pixels: the centres that a shape may have along either axis
LANES = (16, 48)  # rows or columns of two shapes that pass each other
STRIPE_PERIOD = 3  # tokens: one dark, two light; the least period that shows which way it slides

_STRIPE_SHADE = 0.88


@dataclass(frozen=True)
class MovingShape:
    """One shape. `x`, `y`: centre in pixels (right, down) in frame 0. `direction`: None if it stays still.

    `speed` and `ending` are names in `SPEEDS` and `ENDINGS`, and None if it stays still.
    """

    shape: str
    colour: str
    size: str
    x: int
    y: int
    direction: str | None = None
    speed: str | None = None
    ending: str | None = None

    def path(self, num_frames: int = NUM_FRAMES) -> np.ndarray:
        """Return the centre in every frame, int `[T, 2]`: x and y in pixels."""
        return path((self.x, self.y), self.direction, self.speed, self.ending, num_frames)


@dataclass(frozen=True)
class Clip:
    """A clip's ground truth. The first of `objects` is the one that may move; a second one stays still."""

    objects: tuple[MovingShape, ...]
    background: str
    texture: str
    camera: str = "still"

    def stripe_phase(self, frame: int) -> int:
        """Return the column of tokens, modulo `STRIPE_PERIOD`, that is dark in a frame."""
        return CAMERAS[self.camera] * frame % STRIPE_PERIOD


def path(
    start: tuple[int, int],
    direction: str | None,
    speed: str | None,
    ending: str | None,
    num_frames: int = NUM_FRAMES,
) -> np.ndarray:
    """Return the centres `[T, 2]` in pixels of a shape that starts at `start` and so moves.

    It makes a step of one token in every frame whose number is a multiple of `SPEEDS[speed]`, frame 0 excepted.
    """
    points = np.tile(np.array(start), (num_frames, 1))
    if direction is None:
        return points
    assert speed is not None
    place, step = np.array(start), CELL * np.array(DIRECTIONS[direction])
    for frame in range(1, num_frames):
        if frame % SPEEDS[speed] == 0:
            if not _inside(place + step):
                step = -step if ending == "bounces" else np.zeros_like(step)
            place = place + step
        points[frame] = place
    return points


def _inside(point: np.ndarray) -> bool:
    return bool(((point >= PLACES[0]) & (point <= PLACES[-1])).all())


def can_step(point: tuple[int, int], direction: str) -> bool:
    """Return whether a shape at `point` can make a step in a direction before it is at the border."""
    return _inside(np.array(point) + CELL * np.array(DIRECTIONS[direction]))


def caption(clip: Clip) -> str:
    """Return the English caption of a clip, the only form on which the embedded text encoder is trained."""
    first = clip.objects[0]
    text = _phrase(first)
    if first.direction is None:
        text += " stays still"
    else:
        text += f" moves {first.direction} {first.speed} and {first.ending}"
    if len(clip.objects) > 1:
        text += f" past {_phrase(clip.objects[1])}"
    return f"{text} on a {clip.texture} {clip.background} background, camera {clip.camera}"


def _phrase(item: MovingShape) -> str:
    return f"a {item.size} {item.colour} {item.shape}"


def sample_clip(rng: np.random.Generator) -> Clip:
    """Draw a clip: 15 % pass a second shape, 8 % stay still, the camera pans in 40 % of the striped ones."""
    background = str(rng.choice(list(BACKGROUND_COLOURS)))
    texture = str(rng.choice(TEXTURES))
    pans = texture != "plain" and rng.random() < 0.4
    camera = str(rng.choice(["pans left", "pans right"])) if pans else "still"
    shapes = [str(s) for s in rng.choice(SHAPES, 2)]
    colours = [str(c) for c in rng.choice(list(OBJECT_COLOURS), 2, replace=False)]
    size = str(rng.choice(list(SIZES)))
    direction = str(rng.choice(list(DIRECTIONS)))
    speed, ending = str(rng.choice(list(SPEEDS))), str(rng.choice(list(ENDINGS)))
    kind = rng.choice(["single", "still", "pair"], p=[0.77, 0.08, 0.15])
    if kind == "still":
        x, y = (int(v) for v in rng.choice(PLACES, 2))
        return Clip((MovingShape(shapes[0], colours[0], size, x, y),), background, texture, camera)
    # It reaches the border at least one step before the last, so that the clip shows the ending.
    steps = (NUM_FRAMES - 1) // SPEEDS[speed]
    ahead = int(rng.integers(1, min(steps, len(PLACES))))  # steps to the border
    index = len(PLACES) - 1 - ahead if sum(DIRECTIONS[direction]) > 0 else ahead
    lane, other_lane = (int(v) for v in rng.permutation(LANES))
    if kind == "single":
        lane = int(rng.choice(PLACES))
    along_x = DIRECTIONS[direction][0] != 0
    x, y = (PLACES[index], lane) if along_x else (lane, PLACES[index])
    if kind == "single":
        mover = MovingShape(shapes[0], colours[0], size, x, y, direction, speed, ending)
        return Clip((mover,), background, texture, camera)
    mover = MovingShape(shapes[0], colours[0], "small", x, y, direction, speed, ending)
    place = int(rng.choice(PLACES))
    x, y = (place, other_lane) if along_x else (other_lane, place)
    return Clip((mover, MovingShape(shapes[1], colours[1], "small", x, y)), background, texture, camera)


def sample_clips(count: int, seed: int, *, held_out: bool = False) -> list[Clip]:
    """Return clips whose captions are all inside or all outside the held-out tenth."""
    return sample_part(sample_clip, lambda clip: is_held_out(caption(clip)), count, seed, held_out)


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return captions of held-out clips."""
    return [caption(clip) for clip in sample_clips(count, seed, held_out=True)]


def render(clip: Clip, num_frames: int = NUM_FRAMES) -> np.ndarray:
    """Paint a clip: `[T, 64, 64, 3]` uint8."""
    paths = [item.path(num_frames) for item in clip.objects]
    y, x = np.mgrid[0:FRAME_SIZE, 0:FRAME_SIZE].astype(np.float32) + 0.5
    frames: list[np.ndarray] = []
    for frame in range(num_frames):
        canvas = paint_ground(clip.background, clip.texture, x, clip.stripe_phase(frame))
        for item, points in reversed(list(zip(clip.objects, paths, strict=True))):
            dx, dy = x - points[frame, 0], y - points[frame, 1]
            canvas = paint_shape(canvas, dx, dy, item.shape, item.colour, SIZES[item.size])
        frames.append(np.clip(np.rint(canvas), 0, 255).astype(np.uint8))
    return np.stack(frames)


def paint_ground(background: str, texture: str, x: np.ndarray, phase: int) -> np.ndarray:
    """Return a background without objects, float `[H, W, 3]`, for pixels in the columns `x` `[H, W]`.

    Of every three columns of tokens of a striped one, column `phase` is dark.
    """
    dark = (x // CELL) % STRIPE_PERIOD == phase
    shade = np.where(dark & (texture == "striped"), _STRIPE_SHADE, 1.0)
    return np.array(BACKGROUND_COLOURS[background], np.float32) * shade[..., None]
