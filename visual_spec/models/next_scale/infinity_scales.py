"""The token maps of Infinity (Han et al. 2024, arXiv 2412.04431, section 3): schedules, and ScaleKV's budgets for them.

A picture of 1 M pixels has thirteen maps; smaller pictures have the first of these. There is a schedule for each of 15
ratios of height to width. A picture has 16 pixels for each place of the last map, in both directions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from visual_spec.models.core.protocol import Side, sides_of
from visual_spec.models.next_scale.scale_budget import ScaleBudget, offsets_of

# Height and width of the maps by ratio; ratios below 1 have the same maps with sides exchanged.
_MAPS: dict[float, tuple[tuple[int, ...], tuple[int, ...]]] = {
    1.0: ((1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64), (1, 2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64)),
    1.25: ((1, 2, 3, 5, 10, 15, 20, 25, 30, 35, 45, 55, 70), (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 36, 44, 56)),
    1.333: (
        (1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 48, 60, 72),
        (1, 2, 3, 6, 9, 12, 15, 18, 21, 27, 36, 45, 54),
    ),
    1.5: ((1, 2, 3, 6, 9, 15, 21, 27, 33, 39, 48, 63, 78), (1, 2, 2, 4, 6, 10, 14, 18, 22, 26, 32, 42, 52)),
    1.75: ((1, 2, 3, 7, 11, 14, 21, 28, 35, 42, 56, 70, 84), (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48)),
    2.0: ((1, 2, 4, 6, 10, 16, 22, 30, 38, 46, 60, 74, 90), (1, 2, 2, 3, 5, 8, 11, 15, 19, 23, 30, 37, 45)),
    2.5: ((1, 2, 5, 10, 15, 20, 25, 30, 40, 50, 65, 80, 100), (1, 2, 2, 4, 6, 8, 10, 12, 16, 20, 26, 32, 40)),
    3.0: ((1, 2, 6, 9, 15, 21, 27, 36, 45, 54, 72, 90, 111), (1, 2, 2, 3, 5, 7, 9, 12, 15, 18, 24, 30, 37)),
}

# Number of maps by picture side in pixels: 0.06M, 0.25M, 0.60M and 1M in the official code.
SIZES = {256: 7, 512: 10, 768: 12, 1024: 13}

# Official names that do not say it, without endings.
_SIZES_BY_NAME = {"infinity_2b_reg": 1024, "infinity_8b_weights": 1024}

# ScaleKV's published tables for a share of a tenth: by scale, the tokens of a drafter and of a refiner; the drafters.
_PUBLISHED: dict[str, tuple[int, dict[int, tuple[int, int]], tuple[int, ...]]] = {
    "2b": (32, {8: (920, 632), 9: (1490, 594), 10: (2510, 526), 11: (4100, 420), 12: (6385, 465)}, (0, 23)),
    "8b": (40, {8: (909, 629), 9: (1464, 584), 10: (2463, 503), 11: (4054, 374), 12: (6200, 200)}, (0, 1, 2)),
}


def ratios() -> list[float]:
    """Return the ratios of height to width that have schedules, ascending."""
    return sorted({*_MAPS, *(1 / ratio for ratio in _MAPS)})


def scales_for(size: int = 1024, ratio: float = 1.0) -> tuple[Side, ...]:
    """Return the official schedule.

    Args:
        size: side in pixels of a square picture with about the same number of pixels, a key of `SIZES`.
        ratio: ratio of height to width; the nearest of `ratios()` is used.

    Raises:
        ValueError: the size is another one, or the ratio is not above 0.
    """
    if size not in SIZES:
        raise ValueError(f"size={size} given; Infinity draws about as many pixels as {list(SIZES)} squared.")
    if not ratio > 0:
        raise ValueError(f"ratio={ratio} given; pass height / width, a number above 0.")
    nearest = min(ratios(), key=lambda known: abs(known - ratio))
    flipped = nearest < 1
    heights, widths = _MAPS[next(r for r in _MAPS if nearest in (r, 1 / r))]
    if flipped:
        heights, widths = widths, heights
    return sides_of(zip(heights[: SIZES[size]], widths[: SIZES[size]], strict=True))


def size_by_name(path: str | os.PathLike) -> int | None:
    """Return the picture side that the name of an official file or folder says, a key of `SIZES`; None: it does not.

    No weight depends on it. `infinity_8b_512x512_weights` says 512; `infinity_2b_reg.pth` and `infinity_8b_weights`
    are known to be of 1024.
    """
    name = Path(path).name
    for stem, size in _SIZES_BY_NAME.items():
        if name == stem or name.startswith(f"{stem}."):
            return size
    sides = set(re.findall(r"(?<!\d)(\d+)x(\d+)(?!\d)", name))
    squares = {int(height) for height, width in sides if height == width}
    return squares.pop() if len(sides) == 1 and squares <= SIZES.keys() and squares else None


def scales_by_name(size: int | None, path: str | os.PathLike, ratio: float = 1.0) -> tuple[Side, ...]:
    """Return the schedule of a transformer; None: for the pictures that it was trained on, by the name of its file.

    Raises:
        ValueError: the name does not tell it; or as `scales_for`.
    """
    size = size_by_name(path) if size is None else size
    if size is None:
        raise ValueError(
            f"the name of {path} does not tell the size of the pictures that it was trained on, and its weights do not "
            f"depend on it; pass size (image_size to convert, --image-size on the command line), one of {[*SIZES]}, or "
            "give it its official name, such as infinity_2b_reg.pth or infinity_8b_512x512_weights."
        )
    return scales_for(size, ratio)


def scales_of_size(size: int | None, path: object = None) -> tuple[Side, ...]:
    """Return the schedule of a tokenizer, which serves all sizes; None: of 1024 pixels."""
    return scales_for(1024 if size is None else size)


def rope_grid_of(scales: Sequence[Side]) -> Side:
    """The map on which positions are counted: for an official schedule the largest of its ratio, else the last."""
    scales = sides_of(scales)
    for ratio in ratios():
        whole = scales_for(1024, ratio)
        if len(scales) in SIZES.values() and whole[: len(scales)] == scales:
            return whole[-1]
    return scales[-1]


def published_budget(preset: str) -> ScaleBudget:
    """Return ScaleKV's published budget of a tenth, for square pictures of 1024 pixels.

    Args:
        preset: "2b" or "8b".

    Raises:
        ValueError: the preset is another one.
    """
    if preset not in _PUBLISHED:
        raise ValueError(f"preset={preset!r}; there are published budgets for {', '.join(_PUBLISHED)}.")
    layers, table, drafters = _PUBLISHED[preset]
    scales = scales_for(1024)
    rows, chosen = [], []
    for scale, before in enumerate(offsets_of(scales)[:-1]):
        drafter, refiner = table.get(scale, (before, before))
        # In the last scale of the 2B model, only one of its two drafters remains.
        named = () if scale not in table else drafters[:1] if (preset, scale) == ("2b", 12) else drafters
        rows.append(tuple(drafter if layer in named else refiner for layer in range(layers)))
        chosen.append(named)
    return ScaleBudget(scales, tuple(rows), tuple(chosen))
