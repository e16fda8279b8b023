"""Finds the moving shapes, the background and the camera in a clip of `motion`, without a network.

1. Patches of an object colour are found in every frame, as in `visual_spec.data.shapes_finder`.
2. A patch is matched with the mask of every shape and size at every place.
3. Patches of one colour in successive frames form a track. Its kind is the one that fits all its frames best.
4. The places of a track are compared with every path that a shape may take from its first place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from PIL import Image

from visual_spec.data.motion import (
    CAMERAS,
    DIRECTIONS,
    ENDINGS,
    FRAME_SIZE,
    SIZES,
    SPEEDS,
    STRIPE_PERIOD,
    TEXTURES,
    can_step,
    path,
)
from visual_spec.data.shapes import BACKGROUND_COLOURS, CELL, OBJECT_COLOURS, SHAPES, signed_distance
from visual_spec.data.shapes_finder import (
    FILL_INSET,
    WHOLE_COLOURS,
    classify_pixels,
    colour_patches,
    ground_colour,
    shrink,
)

_BACKGROUNDS, _COLOURS = tuple(BACKGROUND_COLOURS), tuple(OBJECT_COLOURS)
_KINDS = tuple(product(SHAPES, SIZES))
_STEP = 4  # pixels between the places tried
_PLACES = np.arange(8, FRAME_SIZE - 7, _STEP)
_MINIMUM_FIT = 0.55  # intersection over union below which a patch has no known shape
_MINIMUM_CONTRAST = 0.03  # between light and dark stripes, in shades; painted ones have 0.12
_LARGEST_REST = 0.05  # mean error in shades beyond which a background is neither plain nor striped
_MINIMUM_SHARE = 0.2  # share of the frames in which an object is seen; fewer are a stain
_JUMP = 20.0  # pixels between two frames beyond which two patches are not one object
_NEAR = 4.0  # pixels between the place of an object and its path


@dataclass(frozen=True)
class FoundMotion:
    """One object of a clip.

    Attributes:
        shape, size: of the mask that fits all frames best; None for a patch that is none of `SHAPES`.
        colour: a name in `OBJECT_COLOURS`.
        points: centre in each frame, float `[T, 2]`, x and y in pixels; NaN where it is not seen.
        fit: mean intersection over union with the ideal mask over the frames where it is seen, 0 to 1.
        direction, speed, ending: the path that its places follow. All None if it stays still (`still`), or if no path
            comes near its places.
        still: whether it stays at one place.
        consistency: share of the frames in which it is seen, looks like its shape and size, and is near its path.
    """

    shape: str | None
    colour: str
    size: str | None
    points: np.ndarray
    fit: float
    direction: str | None
    speed: str | None
    ending: str | None
    still: bool
    consistency: float


@dataclass(frozen=True)
class MotionFacts:
    """Everything that a clip shows. `background`, `texture` and `camera` are None if they are none of the known."""

    objects: tuple[FoundMotion, ...]
    background: str | None
    texture: str | None
    camera: str | None


@dataclass(frozen=True)
class FrameObject:
    """One object of a frame. `shape`, `size`: those that fit best, None for a patch that is none of `SHAPES`. `x`, `y`:
    its centre in pixels."""

    shape: str | None
    colour: str
    size: str | None
    x: float
    y: float


@dataclass(frozen=True)
class FrameFacts:
    """What one frame shows. `background` is None if it is none of the known."""

    objects: tuple[FrameObject, ...]
    background: str | None


@dataclass(frozen=True)
class _Sighting:
    """A patch in one frame: its best fit to each kind `[12]`, and the centres `[12, 2]` of these fits."""

    fits: np.ndarray
    centres: np.ndarray


def parse_clip(frames: np.ndarray | Sequence[Image.Image]) -> MotionFacts:
    """Read a clip: uint8 `[T, H, W, 3]`, or PIL pictures. Square frames of other sizes are resampled to 64 pixels.

    Raises:
        TypeError: the frames are neither pictures nor a uint8 array.
        ValueError: a wrong shape, fewer than two frames, or frames that are not square.
    """
    pixels = _as_pixels(frames)
    read = _read_frames(pixels)
    tracks = _tracks([sightings for sightings, _ in read])
    objects = [_read_track(colour, track, len(pixels)) for colour, track in tracks]
    return MotionFacts(tuple(objects), *_read_grounds([ground for _, ground in read]))


def parse_frames(frames: np.ndarray | Sequence[Image.Image]) -> list[FrameFacts]:
    """Read every frame by itself, of a clip as long as one likes. Arguments and errors as for `parse_clip`."""
    parsed = []
    for sightings, (background, _) in _read_frames(_as_pixels(frames)):
        objects = []
        for colour, sighting in sightings:
            best = int(sighting.fits.argmax())
            shape, size = _KINDS[best] if sighting.fits[best] >= _MINIMUM_FIT else (None, None)
            x, y = sighting.centres[best].tolist()
            objects.append(FrameObject(shape, colour, size, x, y))
        parsed.append(FrameFacts(tuple(objects), background))
    return parsed


def _as_pixels(frames: np.ndarray | Sequence[Image.Image]) -> np.ndarray:
    if not isinstance(frames, np.ndarray):
        if isinstance(frames, Image.Image) or not all(isinstance(frame, Image.Image) for frame in frames):
            raise TypeError(
                "a clip is a list of PIL pictures, or an array uint8 [T, H, W, 3]; pass one of these."
            )
        if len({frame.size for frame in frames}) > 1:
            raise ValueError("the frames differ in size; pass frames of one size.")
        frames = (
            np.stack([np.asarray(frame.convert("RGB")) for frame in frames]) if len(frames) else np.empty(0)
        )
    elif frames.dtype != np.uint8:
        raise TypeError(f"frames are an array of {frames.dtype}; allowed: uint8. Scale them to 0..255.")
    if frames.ndim != 4 or frames.shape[3] != 3 or len(frames) < 2 or frames.shape[1] != frames.shape[2]:
        raise ValueError(
            f"frames have shape {frames.shape}; allowed: [T, H, W, 3] with two or more square frames."
        )
    if frames.shape[1] != FRAME_SIZE:
        size = (FRAME_SIZE, FRAME_SIZE)
        frames = np.stack(
            [np.asarray(Image.fromarray(f).resize(size, Image.Resampling.BILINEAR)) for f in frames]
        )
    return frames


# -- one frame -------------------------------------------------------------------------------------------------------


def _read_frames(
    pixels: np.ndarray,
) -> list[tuple[list[tuple[str, _Sighting]], tuple[str | None, int | None]]]:
    """Return the colours and sightings of objects, and the background, of every frame `[T, 64, 64, 3]`."""
    seen: dict[bytes, tuple[list[tuple[str, _Sighting]], tuple[str | None, int | None]]] = {}
    for frame in pixels:
        if frame.tobytes() in seen:  # most frames of a still scene are equal
            continue
        colour_of, shade = classify_pixels(frame.astype(np.float32))
        patches = [(colour, mask, _sight(colour, mask)) for colour, mask in colour_patches(colour_of, shade)]
        seen[frame.tobytes()] = (
            [
                (_COLOURS[colour - len(_BACKGROUNDS)], sighting)
                for colour, mask, sighting in patches
                # A thin patch of no known shape is an edge between colours, not an object.
                if sighting.fits.max() >= _MINIMUM_FIT or shrink(mask, 2).any()
            ],
            _read_ground(colour_of, shade),
        )
    return [seen[frame.tobytes()] for frame in pixels]


@cache
def _masks(inset: float) -> tuple[np.ndarray, np.ndarray]:
    """Return masks of all kinds at all places, `[12 * P * P, 64 * 64]`, and their areas."""
    y, x = np.mgrid[0:FRAME_SIZE, 0:FRAME_SIZE].astype(np.float32) + 0.5
    stack = [
        signed_distance(shape, x - place_x, y - place_y, SIZES[size]) + inset < 0
        for (shape, size), place_y, place_x in product(_KINDS, _PLACES, _PLACES)
    ]
    flat = np.stack(stack).reshape(len(stack), -1).astype(np.float32)
    return flat, flat.sum(1)


def _sight(colour: int, mask: np.ndarray) -> _Sighting:
    """Match the patch `mask` `[64, 64]` of palette colour `colour` with every kind at every place."""
    masks, areas = _masks(0.0 if colour in WHOLE_COLOURS else FILL_INSET)
    flat = mask.reshape(-1).astype(np.float32)
    common = masks @ flat
    overlap = (common / np.maximum(areas + flat.sum() - common, 1.0)).reshape(len(_KINDS), -1)
    best = overlap.argmax(1)
    centres = np.stack([_PLACES[best % len(_PLACES)], _PLACES[best // len(_PLACES)]], 1)
    return _Sighting(overlap.max(1), centres)


def _read_ground(colour_of: np.ndarray, shade: np.ndarray) -> tuple[str | None, int | None]:
    """Return the background's colour, and the phase of its stripes: -1 if it is plain, None if it is neither."""
    colour = ground_colour(colour_of)
    if colour is None:
        return None, None
    inside = colour_of == colour
    columns = np.broadcast_to(np.arange(FRAME_SIZE) // CELL % STRIPE_PERIOD, inside.shape)
    levels = np.array([shade[inside & (columns == phase)].mean() for phase in range(STRIPE_PERIOD)])
    phase = int(levels.argmin())
    contrast = (levels.sum() - levels[phase]) / (STRIPE_PERIOD - 1) - levels[phase]
    striped = contrast > _MINIMUM_CONTRAST
    expected = levels[phase] + contrast * (columns != phase) if striped else shade[inside].mean()
    rest = float(np.minimum(np.abs(shade - expected)[inside], 0.12).mean())
    return _BACKGROUNDS[colour], None if rest > _LARGEST_REST else phase if striped else -1


# -- the frames together ---------------------------------------------------------------------------------------------


def _read_grounds(grounds: list[tuple[str | None, int | None]]) -> tuple[str | None, str | None, str | None]:
    """Return the background, texture and camera of most frames; None if there is no majority."""
    colour = _majority([name for name, _ in grounds])
    phases = [phase for _, phase in grounds]
    texture = _majority([None if phase is None else TEXTURES[phase >= 0] for phase in phases])
    if texture != "striped":
        return colour, texture, None if texture is None else "still"
    shifts = [
        None if one is None or other is None or min(one, other) < 0 else (other - one) % STRIPE_PERIOD
        for one, other in zip(phases, phases[1:], strict=False)
    ]
    names = {shift % STRIPE_PERIOD: name for name, shift in CAMERAS.items()}
    return colour, texture, _majority([None if shift is None else names[shift] for shift in shifts])


def _majority(names: list[str | None]) -> str | None:
    best = max(names, key=names.count)
    return best if names.count(best) > len(names) / 2 else None


def _tracks(sightings: list[list[tuple[str, _Sighting]]]) -> list[tuple[str, dict[int, _Sighting]]]:
    """Link the patches of each frame to the nearest track of their colour; those seen in few frames are left out."""
    tracks: list[tuple[str, dict[int, _Sighting]]] = []
    for frame, sights in enumerate(sightings):
        for colour, sighting in sights:
            place = sighting.centres[sighting.fits.argmax()]
            near = []
            for track_colour, track in tracks:
                last = track[max(track)]
                if track_colour == colour and frame not in track:
                    gap = float(np.hypot(*(place - last.centres[last.fits.argmax()])))
                    if gap <= _JUMP * (frame - max(track)):
                        near.append((gap, track))
            if near:
                min(near, key=lambda entry: entry[0])[1][frame] = sighting
            else:
                tracks.append((colour, {frame: sighting}))
    return [(colour, track) for colour, track in tracks if len(track) >= _MINIMUM_SHARE * len(sightings)]


def _read_track(colour: str, track: dict[int, _Sighting], num_frames: int) -> FoundMotion:
    fits = np.stack([sighting.fits for sighting in track.values()])  # [seen, 12]
    kind = int(fits.mean(0).argmax())
    fit = float(fits[:, kind].mean())
    points = np.full((num_frames, 2), np.nan)
    for frame, sighting in track.items():
        points[frame] = sighting.centres[kind]
    direction, speed, ending, way = _read_path(points)
    looks = np.zeros(num_frames, bool)
    for frame, sighting in track.items():
        # A frame whose shape is hardly told from another one counts for the shape of the clip.
        looks[frame] = sighting.fits[kind] >= max(_MINIMUM_FIT, sighting.fits.max() - 0.05)
    if way is not None:
        looks &= np.abs(points - way).max(1) <= _NEAR  # NaN is not near
    shape, size = _KINDS[kind] if fit >= _MINIMUM_FIT else (None, None)
    still = way is not None and direction is None
    consistency = float(looks.mean()) if way is not None and shape is not None else 0.0
    return FoundMotion(shape, colour, size, points, fit, direction, speed, ending, still, consistency)


def _read_path(points: np.ndarray) -> tuple[str | None, str | None, str | None, np.ndarray | None]:
    """Return direction, speed, ending and the path `[T, 2]` that comes nearest to `points`; the path is None if every
    one is far."""
    seen = ~np.isnan(points[:, 0])
    # The first place is read from two frames, of which one may be bad.
    starts = {(x, y) for x, y in (CELL * np.round(points[seen][:2] / CELL)).astype(int).tolist()}
    choices: list[tuple[str | None, str | None, str | None]] = [(None, None, None)]
    choices += product(DIRECTIONS, SPEEDS, ENDINGS)
    best, best_error = (None, None, None, None), _NEAR
    for start, choice in product(sorted(starts), choices):
        if choice[0] is not None and not can_step(start, choice[0]):
            continue  # one that turns back at once goes the other way
        way = path(start, *choice, len(points))
        # A far miss counts as one jump: one bad frame must not decide.
        error = float(np.minimum(np.abs(points - way).max(1)[seen], _JUMP).mean())
        if error < best_error:
            best, best_error = (*choice, way), error
    return best
