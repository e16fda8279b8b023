"""Finds the objects, their relations and the background in a picture of `shapes`, without a network.

1. Every pixel goes to the nearest palette colour under any shade (a ray in colour space).
2. The background is the most frequent background colour, with the texture whose painted template fits best.
3. Each connected component of an object colour is a candidate object.
4. A candidate is matched with the mask of every shape and size at every nearby centre. Objects in front are settled
   first; the pixels that they hide count neither for nor against the objects that they cover.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

import numpy as np
from PIL import Image

from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    CELL,
    IMAGE_SIZE,
    OBJECT_COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    render,
    signed_distance,
)

_BACKGROUNDS, _COLOURS = tuple(BACKGROUND_COLOURS), tuple(OBJECT_COLOURS)
_PALETTE = np.array([*BACKGROUND_COLOURS.values(), *OBJECT_COLOURS.values()], np.float32)  # [14, 3]
_FIRST = len(_BACKGROUNDS)  # palette index of the first object colour
_BLACK = _FIRST + _COLOURS.index("black")
# Shades a colour may take: textures and gradients for backgrounds, outline to highlight for objects.
_LOWEST = np.where(np.arange(len(_PALETTE)) < _FIRST, 0.72, 0.50).astype(np.float32)
_HIGHEST = np.where(np.arange(len(_PALETTE)) < _FIRST, 1.10, 1.15).astype(np.float32)
_LOWEST[_BLACK], _HIGHEST[_BLACK] = 0.0, 1.5
# A dark colour merges with its outline under a blur, so these are masked with their outline. The outlines of
# bright colours are distinct, but resemble a grey background (white) or another colour.
WHOLE_COLOURS = tuple(_FIRST + _COLOURS.index(name) for name in ("green", "blue", "purple", "black"))
_FARTHEST = 45.0  # distance in RGB beyond which a pixel has no palette colour
_FILL_SHADE = 0.775  # halfway between outline (0.55) and fill (1.0)
FILL_INSET = 2.0  # the fill ends where the outline of 2 pixels begins
_MINIMUM_AREA = 50  # pixels; the smallest fill, of a small star, has 124
_MINIMUM_FIT = 0.60  # intersection over union below which a component has no known shape
_MINIMUM_BACKGROUND = 0.30  # share of the picture
_HALF_WINDOW = 32  # pixels around a centre; the largest shape reaches 28.1
_REACH = 12  # pixels between the middle of a component and the centres tried
_MAXIMUM_OBJECTS = 6
_BLUR = 1.3  # pixels; masks with corners rounded this much are tried besides the sharp ones
_SLIVER = 50  # pixels of overlap below which an error of one pixel can decide which object seems in front
_KINDS = tuple((shape, size) for shape in SHAPES for size in SIZES)


@dataclass(frozen=True)
class FoundObject:
    """One object of a picture. `x`, `y`: centre in pixels of the 128-pixel canvas (right, down).

    `shape` and `size` are None for a patch of colour that is not one of `SHAPES`. `fit`: intersection over union of
    the visible part with the ideal mask, 0 to 1.
    """

    shape: str | None
    colour: str
    size: str | None
    x: float
    y: float
    fit: float


@dataclass(frozen=True)
class PictureFacts:
    """Everything that a picture shows. `background` and `texture` are None if no known one covers enough of it.

    `relations[i, j]` is the relation of object i to object j: one of `RELATIONS`, "around" (object j is inside it) or
    "under" (object j overlaps it and is in front). If the overlap is a sliver, both are "overlapping". A pair without
    a relation has no entry.
    """

    objects: tuple[FoundObject, ...]
    background: str | None
    texture: str | None
    relations: dict[tuple[int, int], str] = field(default_factory=dict)


def parse_picture(image: Image.Image | np.ndarray) -> PictureFacts:
    """Read a square picture, PIL or uint8 `[H, W, 3]`; other sizes than 128 are resampled to 128 pixels first.

    Raises:
        TypeError: the image is neither a PIL image nor a uint8 array.
        ValueError: it is not square, or does not have three channels.
    """
    pixels = _as_pixels(image)  # [128, 128, 3]
    colour_of, shade = classify_pixels(pixels)  # [128, 128] each
    background, texture = _read_background(colour_of, shade)
    objects = _find_objects(colour_of, shade)
    return PictureFacts(tuple(objects), background, texture, _read_relations(objects, colour_of))


def _as_pixels(image: Image.Image | np.ndarray) -> np.ndarray:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8:
            raise TypeError(
                f"image is an array of {image.dtype}; allowed: uint8. Scale it to 0..255 and convert it."
            )
        if image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(
                f"image has shape {image.shape}; allowed: [H, W, 3]. Pass one RGB picture at a time."
            )
    elif isinstance(image, Image.Image):
        image = np.asarray(image.convert("RGB"))
    else:
        raise TypeError(f"image is {type(image).__name__}; allowed: PIL image or uint8 array [H, W, 3].")
    height, width = image.shape[:2]
    if height != width or height == 0:
        raise ValueError(f"image has {height} x {width} pixels; allowed: a square. Crop it first.")
    if height != IMAGE_SIZE:
        image = np.asarray(Image.fromarray(image).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
    return image.astype(np.float32)


def classify_pixels(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest palette colour (index, or -1 if all are far) and its shade, both `[H, W]`."""
    flat = pixels.reshape(-1, 3)
    dots = _PALETTE @ flat.T  # [14, N]
    squares = np.square(_PALETTE).sum(1)[:, None]
    shades = np.clip(dots / squares, _LOWEST[:, None], _HIGHEST[:, None])
    distance = np.square(flat).sum(1) + shades * (shades * squares - 2 * dots)  # squared, to the ray
    index = distance.argmin(0)
    columns = np.arange(len(flat))
    shade = shades[index, columns]
    index[distance[index, columns] > _FARTHEST**2] = -1
    return index.reshape(pixels.shape[:2]), shade.reshape(pixels.shape[:2])


@cache
def _texture_shades() -> np.ndarray:
    """Return the shade of every texture relative to its colour: `[5, 128, 128]`."""
    name, colour = max(BACKGROUND_COLOURS.items(), key=lambda entry: sum(entry[1]))
    pictures = np.stack([render(Scene((), name, texture)) for texture in TEXTURES])
    return (pictures / np.array(colour, np.float32)).mean(-1)


def ground_colour(colour_of: np.ndarray) -> int | None:
    """The most frequent background colour, as its index in the palette; None if none covers enough."""
    counts = np.bincount(colour_of[(colour_of >= 0) & (colour_of < _FIRST)], minlength=_FIRST)
    colour = int(counts.argmax())
    return None if counts[colour] < _MINIMUM_BACKGROUND * colour_of.size else colour


def _read_background(colour_of: np.ndarray, shade: np.ndarray) -> tuple[str | None, str | None]:
    colour = ground_colour(colour_of)
    if colour is None:
        return None, None
    inside = colour_of == colour
    errors = shade[inside] - _texture_shades()[:, inside]  # [5, N]
    # A small error of the overall brightness is not a texture; nor are a few stray pixels.
    errors -= np.clip(np.median(errors, axis=1, keepdims=True), -0.06, 0.06)
    cost = np.minimum(np.abs(errors), 0.12).mean(1)
    texture = int(cost.argmin())
    return _BACKGROUNDS[colour], TEXTURES[texture] if cost[texture] < 0.05 else None


def _components(labels: np.ndarray) -> np.ndarray:
    """Label connected components (4 neighbours) of equal labels >= 0: `[H, W]` ids, -1 where the label is negative.

    Works on runs of a row. Ids of touching runs are joined by repeatedly hooking each root to the least neighbour and
    halving the paths, so the number of NumPy calls is logarithmic even for noise.
    """
    height, width = labels.shape
    starts = np.ones((height, width), bool)
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    run = np.cumsum(starts.ravel()).reshape(height, width) - 1
    touching = (labels[1:] == labels[:-1]) & (labels[1:] >= 0)
    upper, lower = run[:-1][touching], run[1:][touching]
    parent = np.arange(run[-1, -1] + 1)
    while True:
        a, b = parent[upper], parent[lower]
        if np.array_equal(a, b):
            break
        np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(parent, shortcut := parent[parent]):
            parent = shortcut
    return np.where(labels >= 0, parent[run], -1)


def _neighbours(mask: np.ndarray) -> list[np.ndarray]:
    padded = np.pad(mask, 1, mode="edge")
    return [padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]]


def _grow(mask: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        mask = np.logical_or.reduce([mask, *_neighbours(mask)])
    return mask


def shrink(mask: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        mask = np.logical_and.reduce([mask, *_neighbours(mask)])
    return mask


def colour_patches(colour_of: np.ndarray, shade: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return palette index and mask `[H, W]` of each sufficiently large patch of fill, largest first."""
    is_fill = (colour_of >= _FIRST) & ((shade > _FILL_SHADE) | np.isin(colour_of, WHOLE_COLOURS))
    fill = np.where(is_fill, colour_of, -1)
    # Eroded first, so that a bridge of one or two pixels does not join neighbours; then grown back.
    ids = _components(np.where(np.logical_and.reduce([fill == side for side in _neighbours(fill)]), fill, -1))
    areas = np.bincount(ids[ids >= 0], minlength=1)
    patches = []
    for i in np.argsort(-areas, kind="stable")[:_MAXIMUM_OBJECTS]:
        mask = ids == i
        if areas[i] == 0:
            break
        same = fill == fill[mask][0]
        for _ in range(3):
            mask = _grow(mask, 1) & same
        if mask.sum() >= _MINIMUM_AREA:
            patches.append((int(fill[mask][0]), mask))
    return patches


def _distance_to(seen: FoundObject) -> np.ndarray:
    """Return the signed distance `[128, 128]` to the outline of a found object of known shape."""
    assert seen.shape is not None and seen.size is not None
    y, x = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] + 0.5
    return signed_distance(seen.shape, x - seen.x, y - seen.y, SIZES[seen.size])


@cache
def _templates(inset: float, step: int, blur: float = 0.0) -> np.ndarray:
    """Return masks of all shapes and sizes about the middle of a window, one value per `step` pixels: `[12, K * K]`.

    `blur`: standard deviation in pixels of a blur that rounds the corners of the masks.
    """
    y, x = np.mgrid[0 : 2 * _HALF_WINDOW : step, 0 : 2 * _HALF_WINDOW : step] - _HALF_WINDOW + step / 2
    masks = [np.clip((0.5 - (signed_distance(s, x, y, SIZES[z]) + inset) / step), 0, 1) for s, z in _KINDS]
    stack = np.stack(masks).astype(np.float32)
    if blur:
        offsets = np.subtract.outer(np.arange(len(x)), np.arange(len(x))) * step
        kernel = np.exp(-0.5 * np.square(offsets / blur)).astype(np.float32)
        kernel /= kernel.sum(1, keepdims=True)
        stack = (kernel @ stack @ kernel.T > 0.5).astype(np.float32)
    return stack.reshape(len(_KINDS), -1)


def _windows(plane: np.ndarray, x: int, y: int, reach: int, fill: float, step: int) -> np.ndarray:
    """Return windows of a plane about a square of centres: `[(2 reach / step + 1)^2, K * K]`, ordered by y, x."""
    margin = _HALF_WINDOW + _REACH + reach  # a centre is at most _REACH outside the picture
    padded = np.pad(plane.astype(np.float32), margin, constant_values=fill)
    side = 2 * (_HALF_WINDOW + reach)
    top, left = y - _HALF_WINDOW - reach + margin, x - _HALF_WINDOW - reach + margin
    crop = padded[top : top + side, left : left + side]
    crop = crop.reshape(side // step, step, side // step, step).mean((1, 3))
    length = 2 * _HALF_WINDOW // step
    view = np.lib.stride_tricks.sliding_window_view(crop, (length, length))
    return view.reshape(-1, length * length)


def _overlaps(mask: np.ndarray, visible: np.ndarray, templates: np.ndarray) -> np.ndarray:
    """Return intersection over union of masks and templates, counted where visible: `[centres, templates]`."""
    common = mask @ templates.T
    return common / np.maximum(visible @ templates.T + mask.sum(1, keepdims=True) - common, 1e-6)


def _fit(colour: int, mask: np.ndarray, hidden: np.ndarray) -> FoundObject:
    """Return the best shape, size and centre for a patch of fill whose pixels in `hidden` cannot be seen."""
    visible = ~hidden | mask
    ys, xs = np.nonzero(mask)
    x, y = int(xs.min() + xs.max() + 1) // 2, int(ys.min() + ys.max() + 1) // 2
    inset = 0.0 if colour in WHOLE_COLOURS else FILL_INSET
    reach = _REACH
    coarse = _overlaps(
        _windows(mask, x, y, reach, 0.0, 2), _windows(visible, x, y, reach, 1.0, 2), _templates(inset, 2)
    )
    where, most = coarse.argmax(0), coarse.max(0)
    best = FoundObject(None, _COLOURS[colour - _FIRST], None, x, y, 0.0)
    per_row = reach + 1
    for kind in np.argsort(-most)[:4]:
        near_x = x - reach + 2 * int(where[kind] % per_row)
        near_y = y - reach + 2 * int(where[kind] // per_row)
        fine = _overlaps(
            _windows(mask, near_x, near_y, 2, 0.0, 1),
            _windows(visible, near_x, near_y, 2, 1.0, 1),
            np.stack([_templates(inset, 1)[kind], _templates(inset, 1, _BLUR)[kind]]),
        ).max(1)
        place = int(fine.argmax())
        if fine[place] > best.fit:
            shape, size = _KINDS[kind]
            best = FoundObject(
                shape, best.colour, size, near_x - 2 + place % 5, near_y - 2 + place // 5, float(fine[place])
            )
    if best.fit < _MINIMUM_FIT:
        return FoundObject(None, best.colour, None, x, y, best.fit)
    return best


def _find_objects(colour_of: np.ndarray, shade: np.ndarray) -> list[FoundObject]:
    patches = colour_patches(colour_of, shade)
    hidden = np.zeros(colour_of.shape, bool)
    fits = [_fit(colour, mask, hidden) for colour, mask in patches]
    objects: list[FoundObject] = []
    waiting = list(range(len(patches)))
    while waiting:
        # A patch enclosed by another is in front of it, unless it is a stain; otherwise complete patches are in front
        # of covered ones.
        enclosed = [
            fits[i].shape is not None
            and any(_encloses(patches[j][1], patches[i][1]) for j in waiting if j != i)
            for i in waiting
        ]
        chosen = max(zip(enclosed, [fits[i].fit for i in waiting], waiting, strict=True))[2]
        waiting.remove(chosen)
        objects.append(fits[chosen])
        if fits[chosen].shape is None:
            if not shrink(patches[chosen][1], 2).any():
                objects.pop()  # an edge between colours, not an object
            continue
        reach = _distance_to(fits[chosen])
        hidden |= reach < 1.0
        for i in list(waiting):
            colour, mask = patches[i]
            if (mask & (reach < 2)).sum() > 0.7 * mask.sum():
                waiting.remove(i)  # a fragment or a stain of the object just settled
            elif (_grow(mask, 4) & (reach < 1.0)).any():
                fits[i] = _fit(colour, mask, hidden)
    return objects


def _encloses(outer: np.ndarray, inner: np.ndarray) -> bool:
    """Return whether the bounding box of one mask contains the other's box with a pixel to spare."""
    (oy, ox), (iy, ix) = np.nonzero(outer), np.nonzero(inner)
    return bool(oy.min() < iy.min() and iy.max() < oy.max() and ox.min() < ix.min() and ix.max() < ox.max())


def _read_relations(objects: list[FoundObject], colour_of: np.ndarray) -> dict[tuple[int, int], str]:
    distances = [None if item.shape is None else _distance_to(item) for item in objects]
    relations = {}
    for i, j in permutations(range(len(objects)), 2):
        relation = _relation(objects[i], objects[j], distances[i], distances[j], colour_of)
        if relation is not None:
            relations[i, j] = relation
    return relations


def _relation(
    first: FoundObject,
    second: FoundObject,
    first_distance: np.ndarray | None,
    second_distance: np.ndarray | None,
    colour_of: np.ndarray,
) -> str | None:
    dx, dy = first.x - second.x, first.y - second.y
    if first_distance is not None and second_distance is not None:
        first_area, second_area = (first_distance < 0).sum(), (second_distance < 0).sum()
        both = ((first_distance < 0) & (second_distance < 0)).sum()
        if both > 0.9 * min(first_area, second_area) and max(abs(dx), abs(dy)) <= CELL:
            return "inside" if first_area < second_area else "around"
        radii = SIZES[first.size or "large"] + SIZES[second.size or "large"]
        # Corners that face each other may leave a gap of 4 pixels in a pair painted as overlapping.
        gap = 2 * np.maximum(first_distance, second_distance).min()
        if gap < 4.5 and np.hypot(dx, dy) < 0.8 * radii:
            common = (first_distance < 0) & (second_distance < 0)
            seen = [
                int((colour_of[common] == _FIRST + _COLOURS.index(o.colour)).sum()) for o in (first, second)
            ]
            return "overlapping" if seen[0] >= seen[1] or sum(seen) < _SLIVER else "under"
    if max(abs(dx), abs(dy)) < 2 * CELL or abs(dx) == abs(dy):
        return None
    if abs(dx) > abs(dy):
        return "left of" if dx < 0 else "right of"
    return "above" if dy < 0 else "below"
