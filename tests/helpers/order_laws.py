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
