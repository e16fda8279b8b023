"""Decoding orders as plain data: what each target call emits, what it feeds, what that sees, and which head answers.

An order is a tuple of steps, the same for all samples. Step 0 is the prefill: it feeds the condition and emits slot 0,
or the first block.

* `raster`: one token a call, the reference.
* `diagonal`: a raster model along anti-diagonals (ZipAR, arXiv 2412.04062; Diagonal Decoding, 2503.14070).
* `near_to_far`: all slots of one distance from the corner, one head a dimension (NAR, arXiv 2503.10696); of a clip, its
  planes of equal frame + row + column. FlashAR's order (2605.09430) is the same over a picture; its model merges the
  heads otherwise.
* `regions`: one token of every region of the picture (PAR, arXiv 2412.15119).
* `blocks`: all tokens of a square block (Token-Shuffle, arXiv 2504.17789).

The rotary index of a position is the slot it is fed at. PAR's published rotary table is permuted because its cache runs
in decoding order; a cache that is written by slot needs no permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from itertools import pairwise
from math import isqrt

import torch
from torch import Tensor

from visual_spec.models.core.protocol import RASTER_ORDER, TokenGrid
from visual_spec.samplers.orders.row_order import RowOrder


@dataclass(frozen=True)
class Step:
    """One target call: W positions are fed, P slots are emitted. K learned tokens have the places L to L + K - 1.

    Attributes:
        emitted: long [P].
        sources: long [W], the slot whose token a position feeds; L + k feeds the learned token k.
        slots: long [W], the cache place and rotary index of a position: its source, except for a stand-in.
        seen: bool [W, L + K], the places that a position attends to.
        answers: long [P, H], the position that answers for an emitted slot with head h; -1: that head has none.
    """

    emitted: Tensor
    sources: Tensor
    slots: Tensor
    seen: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> Step:
        """Return the step on a device."""
        return Step(*(getattr(self, part.name).to(device) for part in fields(self)))


@dataclass(frozen=True)
class TokenOrder:
    """A decoding order over one grid.

    Attributes:
        heads: names of the H output heads that answer.
        steps: the target calls, prefill first.
        learned: K, learned tokens that the order feeds.
    """

    heads: tuple[str, ...]
    steps: tuple[Step, ...]
    learned: int = 0

    @property
    def width(self) -> int:
        """The most positions of a call."""
        return max(len(step.sources) for step in self.steps)

    def joined(self) -> Step:
        """Return all calls after the prefill as one, with the mask of each: the pass of training.

        Raises:
            ValueError: the order feeds a slot twice (a stand-in first), which one pass cannot.
        """
        slots = torch.cat([step.slots for step in self.steps])
        if len(slots.unique()) < len(slots):
            raise ValueError("this order feeds some slots twice; feed its steps one after the other.")
        answers, first = [], 0
        for step in self.steps[1:]:
            answers.append(step.answers.where(step.answers < 0, step.answers + first))
            first += len(step.slots)
        return Step(
            emitted=torch.cat([step.emitted for step in self.steps[1:]]),
            sources=torch.cat([step.sources for step in self.steps]),
            slots=slots,
            seen=torch.cat([step.seen for step in self.steps]),
            answers=torch.cat(answers) if answers else self.steps[0].answers[:0],
        )


# What one call emits and feeds, and the positions that answer for each emitted slot, by head.
Call = tuple[Sequence[int], Sequence[int], Sequence[Sequence[int]]]


def _order(
    grid: TokenGrid,
    heads: tuple[str, ...],
    calls: Sequence[Call],
    learned: int = 0,
    emitted: Sequence[int] = (0,),
) -> TokenOrder:
    """Return an order whose positions see all that is fed up to their own call, both ways within a call."""
    seen = torch.zeros(grid.num_tokens + learned, dtype=torch.bool)
    steps = [_prefill(grid, heads, learned, emitted)]
    for emitted, fed, answers in calls:
        slots = torch.tensor(fed)
        seen = seen.index_fill(0, slots, True)
        steps.append(
            Step(torch.tensor(emitted), slots, slots, seen.expand(len(fed), -1), torch.tensor(answers))
        )
    return TokenOrder(heads, tuple(steps), learned)


def _prefill(
    grid: TokenGrid, heads: tuple[str, ...], learned: int = 0, emitted: Sequence[int] = (0,)
) -> Step:
    none = torch.zeros(0, dtype=torch.long)
    seen = torch.zeros(0, grid.num_tokens + learned, dtype=torch.bool)
    answers = torch.zeros(len(emitted), len(heads), dtype=torch.long)
    return Step(torch.tensor(emitted), none, none, seen, answers)


def raster(grid: TokenGrid) -> TokenOrder:
    """Return raster order. Steps: L."""
    return _order(grid, ("next",), [([slot + 1], [slot], [[0]]) for slot in range(grid.num_tokens - 1)])


def near_to_far(grid: TokenGrid) -> TokenOrder:
    """Return NAR's order: the slots with t + h + w = d in step d. Steps: T + H + W - 2.

    A slot is predicted by its neighbours to the left, above and one frame before, each with the head of that
    dimension. A position sees all slots no farther from the corner than itself.
    """
    heads = ("right", "below", "later")[: 2 if grid.frames == 1 else 3]
    neighbours = (grid.left, grid.up, grid.previous_frame)[: len(heads)]
    planes: list[list[int]] = [[] for _ in range(grid.frames + grid.height + grid.width - 2)]
    for slot in range(grid.num_tokens):
        planes[sum(grid.coordinates(slot))].append(slot)
    calls = []
    for before, plane in pairwise(planes):
        place = {slot: position for position, slot in enumerate(before)}
        answers = [[place.get(neighbour(slot), -1) for neighbour in neighbours] for slot in plane]  # type: ignore[arg-type]
        calls.append((plane, before, answers))
    return _order(grid, heads, calls)


def regions(grid: TokenGrid, count: int) -> TokenOrder:
    """Return PAR's order: `count` regions, their first tokens one by one, then one token of each region a step.

    Steps: count + (L - count) / count. In the first parallel step the last of the first tokens and count - 1 learned
    tokens are fed, later the tokens of the step before; position r predicts the token of region r.

    Raises:
        ValueError: the count is no square number, or its regions do not fit the grid.
    """
    side = isqrt(count)
    height, width = grid.height // side, grid.width // side
    if side * side != count or grid.height % side or grid.width % side or grid.frames > 1:
        raise ValueError(
            f"{count} regions of a grid of {grid.frames} x {grid.height} x {grid.width} tokens; the picture is cut in "
            "as many rows of regions as columns: pass a square number whose root divides height and width, and one "
            "frame."
        )
    corners = [row * height * grid.width + column * width for row in range(side) for column in range(side)]
    inside = [row * grid.width + column for row in range(height) for column in range(width)]
    first, *groups = [[corner + offset for corner in corners] for offset in inside]
    learned = range(grid.num_tokens, grid.num_tokens + count - 1)
    fed = [[first[-1], *learned], *groups]
    each = [[position] for position in range(count)]
    calls: list[Call] = [([slot], [before], [[0]]) for before, slot in pairwise(first)]
    calls += [(group, positions, each) for group, positions in zip(groups, fed, strict=False)]
    return _order(grid, ("same place",), calls, count - 1)


def blocks(grid: TokenGrid, side: int) -> TokenOrder:
    """Return Token-Shuffle's order: all tokens of a block of `side` x `side` in one step, blocks in raster order.

    Steps: L / side^2. The prefill emits the first block. A call feeds the tokens of a block, which the model may merge
    into one position, and its position r predicts place r of the next block.

    Raises:
        ValueError: the blocks do not fit the grid.
    """
    if grid.height % side or grid.width % side:
        raise ValueError(
            f"blocks of {side} x {side} in frames of {grid.height} x {grid.width} tokens; pass a grid whose height and "
            f"width are multiples of {side}."
        )
    slots = torch.arange(grid.num_tokens).view(
        grid.frames, grid.height // side, side, grid.width // side, side
    )
    first, *others = slots.permute(0, 1, 3, 2, 4).reshape(-1, side * side).tolist()
    each = [[position] for position in range(side * side)]
    calls: list[Call] = [(block, before, each) for before, block in pairwise([first, *others])]
    return _order(grid, ("same place",), calls, emitted=first)


def diagonal(grid: TokenGrid, window: int = 1) -> TokenOrder:
    """Return ZipAR's order for a raster model: `RowOrder`, every open row advancing in every call.

    Steps: W + (rows - 1) * min(window, W) for rows of W tokens; window 1 is Diagonal Decoding.
    """
    order, num_tokens = RowOrder.over(grid, window), grid.num_tokens
    lengths, row = order.start(1, torch.device("cpu"))
    steps = [_prefill(grid, ("next",))]
    while not order.done(lengths).all():
        plan = order.plan(lengths, row)
        fed, asked = plan.slots[0] < num_tokens, plan.predicted[0] < num_tokens
        answers = asked[fed].nonzero()  # [P, 1]
        emitted = plan.predicted[0, fed & asked]
        steps.append(Step(emitted, plan.sources[0, fed], plan.slots[0, fed], plan.seen[0, fed], answers))
        lengths, row = order.advance(lengths, row, plan, plan.scored)
    return TokenOrder(("next",), tuple(steps))


# How each order is made over a grid.
ORDERS: dict[str, Callable[[TokenGrid], TokenOrder]] = {
    RASTER_ORDER: raster,
    "diagonal": diagonal,
    "nar": near_to_far,
    "flashar": near_to_far,
    "par4": partial(regions, count=4),
    "par16": partial(regions, count=16),
    "blocks2": partial(blocks, side=2),
    "blocks4": partial(blocks, side=4),
}


@cache
def order_of(name: str, grid: TokenGrid) -> TokenOrder:
    """Return an order of `ORDERS` over a grid.

    Raises:
        KeyError: the name is unknown.
        ValueError: the order does not fit the grid.
    """
    return ORDERS[name](grid)


@cache
def steps_on(name: str, grid: TokenGrid, device: torch.device) -> tuple[Step, ...]:
    """Return the steps of an order on a device; they are copied there once."""
    return tuple(step.to(device) for step in order_of(name, grid).steps)
