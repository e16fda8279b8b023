"""The noise of a slot as an area: what draws with one row of Gumbel noise have in common, without sampling.

With E_v = exp(-G_v), independent standard exponentials, argmax(log law + G) = argmin E_v / law_v, which depends on the
direction of E only. With V = 3 that is uniform on a triangle. A draw cuts the triangle into three convex cells, and
whoever goes on with the same noise carries the polygon in which it must lie.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Point = tuple[float, float]  # the first two barycentric coordinates
_TRIANGLE: tuple[Point, ...] = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
_EDGE = 1e-14  # a corner this near a cut lies on it
_LEAST = 1e-18  # a polygon of less area is none


def hash_rows(columns: Tensor) -> Tensor:
    """One 64-bit number for each row of an integer matrix; equal rows and, but for chance, only they agree."""
    columns = F.pad(columns, (0, 1), value=1)  # rows of zeros of different lengths differ, too
    generator = torch.Generator().manual_seed(columns.shape[1])
    factors = torch.randint(-(2**62), 2**62, (columns.shape[1],), generator=generator)
    mixed = columns * 0x9E3779B97F4A7C1 + (columns >> 7)
    return (mixed * (2 * factors + 1)).sum(1)


def quantised(probabilities: Tensor) -> Tensor:
    return (probabilities * 2**42).round().long()


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Index of one representative of each distinct key, and the representative's position for every row."""
    values, inverse = keys.unique(return_inverse=True)
    first = torch.empty(len(values), dtype=torch.long)
    first[inverse] = torch.arange(len(keys))
    return first, inverse


def _area(polygon: tuple[Point, ...]) -> float:
    """Share of the triangle."""
    twice = 0.0
    for (x0, y0), (x1, y1) in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        twice += x0 * y1 - x1 * y0
    return abs(twice)


def _clip(polygon: tuple[Point, ...], a: float, b: float, c: float) -> tuple[Point, ...]:
    """The part of a convex polygon where a x + b y + c >= 0."""
    kept: list[Point] = []
    heights = [a * x + b * y + c for x, y in polygon]
    for index, point in enumerate(polygon):
        before, height = heights[index - 1], heights[index]
        if (height > _EDGE and before < -_EDGE) or (height < -_EDGE and before > _EDGE):
            (x0, y0), (x1, y1) = polygon[index - 1], point
            share = before / (before - height)
            kept.append((x0 + share * (x1 - x0), y0 + share * (y1 - y0)))
        if height >= -_EDGE:
            kept.append(point)
    return tuple(kept)


def cells(polygon: tuple[Point, ...], law: list[float]) -> list[tuple[Point, ...]]:
    """The three parts of a polygon in which argmin E_v / law_v is 0, 1, 2."""
    # In barycentric coordinates E = (x, y, 1 - x - y); v wins over u where law_v E_u - law_u E_v >= 0.
    coordinates = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (-1.0, -1.0, 1.0))
    parts = []
    for v in range(3):
        part = polygon
        for u in range(3):
            if u != v and len(part) > 2:
                cut = [
                    law[v] * e_u - law[u] * e_v
                    for e_u, e_v in zip(coordinates[u], coordinates[v], strict=True)
                ]
                part = _clip(part, *cut)
        parts.append(part if law[v] > 0 and len(part) > 2 else ())
    return parts


class Regions:
    """The polygons that branches carry, by number; 0 is the whole triangle."""

    def __init__(self) -> None:
        self.polygons: list[tuple[Point, ...]] = [_TRIANGLE]
        self._number: dict[tuple, int] = {}
        self._cuts: dict[int, tuple[list[float], list[int]]] = {}

    def draw(self, regions: Tensor, laws: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of each token given the region [N], law [N, V <= 3], and the region that each leaves: [N, 3]."""
        laws = F.pad(laws, (0, 3 - laws.shape[1]))
        keys = hash_rows(torch.cat([regions[:, None], quantised(laws)], 1))
        first, inverse = distinct(keys)
        found = [
            self._cut(key, region, law)
            for key, region, law in zip(
                keys[first].tolist(), regions[first].tolist(), laws[first].tolist(), strict=True
            )
        ]
        probability = torch.tensor([shares for shares, _ in found], dtype=torch.float64)
        return probability[inverse], torch.tensor([numbers for _, numbers in found])[inverse]

    def _cut(self, key: int, region: int, law: list[float]) -> tuple[list[float], list[int]]:
        if key not in self._cuts:
            whole = self.polygons[region]
            parts = cells(whole, law)
            areas = [_area(part) for part in parts]
            assert abs(sum(areas) - _area(whole)) < 1e-13
            # A polygon of no area is a branch of no weight; it needs no number of its own.
            numbers = [
                self._add(part) if area > _LEAST else 0 for part, area in zip(parts, areas, strict=True)
            ]
            self._cuts[key] = ([area / sum(areas) for area in areas], numbers)
        return self._cuts[key]

    def _add(self, polygon: tuple[Point, ...]) -> int:
        name = tuple(sorted((round(x, 13), round(y, 13)) for x, y in polygon))
        if name not in self._number:
            self._number[name] = len(self.polygons)
            self.polygons.append(polygon)
        return self._number[name]


def total_variation(first: Tensor, second: Tensor) -> float:
    return 0.5 * float((first - second).abs().sum())
