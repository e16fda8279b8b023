"""Reads a clip of any length frame by frame: whether what its caption names is still there, and still moves.

`visual_spec.data.motion_parser.score` compares a clip with the one path that its caption allows. Over hundreds of
frames a single late step would fail that for good, and a path says nothing about when a clip went wrong. Here each
frame is compared with the caption and with the frames just before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from visual_spec.data.motion import SPEEDS
from visual_spec.data.motion_finder import FrameObject, parse_frames
from visual_spec.data.motion_parser import WantedMotion, parse_caption
from visual_spec.data.shapes import CELL

STEP = CELL + 4.0  # pixels that an object may move in a frame, and the grid on which it is found
_MOVING = 8  # frames in which an object that moves has to make at least half of its steps

NAMES = ("kept", "colour", "shape", "size", "background", "continuous", "moving")


def consistency(prompt: str, frames: np.ndarray | Sequence[Image.Image]) -> dict[str, np.ndarray]:
    """Return what of a caption holds in each frame, bool `[T]` by name, with all of it under "all".

    kept: there are as many objects as the caption names, whatever they look like. colour, shape, size: the objects are
    as the caption says. background: likewise. continuous: the first object is at most a step away from where it was
    in the frame before; where it is not seen, or was not, that fails. The first frame is continuous if it is seen.
    moving: in the last `_MOVING` frames the first object made half of the steps that its speed makes, or if it stays
    still, none. It is not asked where a path may end (it "stops"), and in the first `_MOVING` frames.

    Args:
        prompt: a caption of `motion`.
        frames: uint8 `[T, H, W, 3]`, or PIL pictures.

    Raises:
        TypeError, ValueError: as `parse_caption` and `parse_frames`.
    """
    wanted, facts = parse_caption(prompt), parse_frames(frames)
    chosen = [_assigned(wanted.objects, fact.objects) for fact in facts]
    held = {
        "kept": [len(fact.objects) == len(wanted.objects) for fact in facts],
        "background": [fact.background == wanted.background for fact in facts],
    }
    for name in ("colour", "shape", "size"):
        held[name] = [
            all(
                item is not None and getattr(item, name) == getattr(want, name)
                for want, item in zip(wanted.objects, items, strict=True)
            )
            for items in chosen
        ]
    places = np.array(
        [(np.nan, np.nan) if items[0] is None else (items[0].x, items[0].y) for items in chosen]
    )
    steps = np.abs(np.diff(places, axis=0)).max(1)  # [T - 1]; NaN compares as false
    held["continuous"] = [bool(np.isfinite(places[0, 0])), *(steps <= STEP).tolist()]
    held["moving"] = _moving(wanted.objects[0], places)
    answers = {name: np.array(held[name], bool) for name in NAMES}
    return answers | {"all": np.all(list(answers.values()), 0)}


def _assigned(wanted: Sequence[WantedMotion], objects: Sequence[FrameObject]) -> list[FrameObject | None]:
    """The object of a frame that is most like each wanted one, by colour, then shape, then size; None if there is none.

    Each is taken once.
    """
    left, chosen = list(objects), []
    for want in wanted:
        if not left:
            chosen.append(None)
            continue
        best = max(
            left,
            key=lambda item: (item.colour == want.colour, item.shape == want.shape, item.size == want.size),
        )
        left.remove(best)
        chosen.append(best)
    return chosen


def _moving(want: WantedMotion, places: np.ndarray) -> list[bool]:
    """Whether an object at `places` `[T, 2]` moved in the last frames as often as it should."""
    if want.ending == "stops":
        return [True] * len(places)
    moved = np.abs(np.diff(places, axis=0, prepend=places[:1])).max(1) >= CELL / 2  # of NaN: no
    frames = np.arange(len(places))
    made = np.array([moved[max(0, frame - _MOVING + 1) : frame + 1].sum() for frame in frames])
    if want.speed is None:
        return (made == 0).tolist()
    least = _MOVING / SPEEDS[want.speed] / 2
    return ((made >= least) | (frames < _MOVING)).tolist()
