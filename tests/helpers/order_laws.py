"""Exact laws of drawing tokens in an order of one's own."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN
from tests.exactness.plain_masking import Plain
from tests.helpers.tabular import TabularMaskedModel, TabularOrderModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import halton_order


def joint_along(model: TabularAnyOrderModel, order: list[int]) -> Tensor:
    """The joint law [V ** L] of unguided tokens, those of the first place most significant."""
    return model.joint[0].view([model.vocab_size] * len(order)).permute(order).flatten()


ORDERS = {"raster": [0, 1, 2, 3], "halton": halton_order(1, 2, 2).tolist()}


def one_a_call(model: TabularMaskedModel, order: list[int], law: TokenLaw = PLAIN) -> Tensor:
    """The law of four tokens in the order of decoding, by a second writing of masked decoding with four steps."""
    second = Plain(
        model,
        [4],
        schedule="linear",
        orders=[order],
        scale=law.guidance_scale,
        temperature=max(law.temperature, 1e-3),
        top_p=law.top_p,
    )
    found = second.law()
    every = itertools.product(range(model.vocab_size), repeat=4)
    placed = [tuple(tokens[order.index(slot)] for slot in range(4)) for tokens in every]
    return torch.tensor([found.get(tokens, 0.0) for tokens in placed], dtype=torch.float64)


# -- orders that are data

# Of a slot: by head, the place that answers; and the slots that it sees.
Definition = Callable[[TokenGrid, int], tuple[dict[int, int], set[int]]]


def blocks_of_two(grid: TokenGrid, slot: int) -> tuple[dict[int, int], set[int]]:
    def block(slot: int) -> tuple[int, int]:
        frame, row, column = grid.coordinates(slot)
        return frame * grid.height + row // 2 * 2, column // 2 * 2

    def corner(block: tuple[int, int]) -> int:
        return block[0] * grid.width + block[1]

    own = block(slot)
    earlier = {other for other in range(grid.num_tokens) if block(other) < own}
    if not earlier:
        return {}, set()
    before = max(block(other) for other in earlier)
    return {0: slot - corner(own) + corner(before)}, earlier


def product_law(model: TabularOrderModel, law: TokenLaw, definition: Definition, guided: bool) -> Tensor:
    """The probability of every sequence: at each slot the law of the mean of its heads, all slots multiplied."""
    size, length = model.vocab_size, model.grid.num_tokens
    told = [definition(model.grid, slot) if slot else ({}, set()) for slot in range(length)]
    tables = [0, len(model.logits) - 1][: 2 if guided else 1]
    found = []
    for tokens in itertools.product(range(size), repeat=length):
        probability = 1.0
        for slot, (heads, seen) in enumerate(told):
            context = 0
            for other in range(length):
                context = context * (size + 1) + (tokens[other] if other in seen else size)
            if not heads:  # the prefill
                logits = model.logits[tables, :, context, slot].mean(1)
            else:
                parts = [
                    model.logits[tables, h, context, slot] + model.places[h, place, slot]
                    for h, place in heads.items()
                ]
                logits = torch.stack(parts).mean(0)
            log_probs = law(logits[:, None], guided, torch.tensor([[slot]]))[0, 0]
            probability *= float(log_probs[tokens[slot]].exp())
        found.append(probability)
    return torch.tensor(found, dtype=torch.float64)


NEAR_TO_FAR = ("nar", "flashar")


def near_to_far(grid: TokenGrid, slot: int) -> tuple[dict[int, int], set[int]]:
    at = torch.tensor(grid.coordinates(slot))
    heads = {}
    for head, axis in enumerate((2, 1, 0)):  # columns, rows, frames
        if at[axis] > 0:
            place = at.clone()
            place[axis] -= 1
            frame, row, column = place.tolist()
            heads[head] = (frame * grid.height + row) * grid.width + column
    nearer = {s for s in range(grid.num_tokens) if sum(grid.coordinates(s)) < int(at.sum())}
    return heads, nearer


def four_regions(grid: TokenGrid, slot: int) -> tuple[dict[int, int], set[int]]:
    _, row, column = grid.coordinates(slot)
    height, width = grid.height // 2, grid.width // 2

    def rank(row: int, column: int) -> tuple[int, int]:
        inside = row % height * width + column % width
        return inside, row // height * 2 + column // width

    by_rank = {rank(*grid.coordinates(s)[1:]): s for s in range(grid.num_tokens)}
    inside, region = rank(row, column)
    if inside == 0:  # the first tokens follow each other
        return {0: by_rank[0, region - 1]}, {by_rank[0, r] for r in range(region)}
    earlier = {s for (place, _), s in by_rank.items() if place < inside}
    learned = grid.num_tokens + region - 1
    before = by_rank[inside - 1, region] if inside > 1 else by_rank[0, 3] if region == 0 else learned
    return {0: before}, earlier


GUIDED = TokenLaw(guidance_scale=1.7, temperature=0.9)
DEFINITIONS = {"nar": near_to_far, "flashar": near_to_far, "par4": four_regions, "blocks2": blocks_of_two}


def made(name: str, grid: TokenGrid, vocab_size: int) -> TabularOrderModel:
    if name in NEAR_TO_FAR:
        return TabularOrderModel(grid, vocab_size, name, heads=3 if grid.frames > 1 else 2)
    if name == "blocks2":
        return TabularOrderModel(grid, vocab_size, name, first=(0, 1, grid.width, grid.width + 1))
    return TabularOrderModel(grid, vocab_size, name, learned=3)
