"""Exact laws of drawing tokens in an order of one's own."""

import itertools

import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN
from tests.exactness.plain_masking import Plain
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
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
