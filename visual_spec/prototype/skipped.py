"""A drafter without weights of its own: the target without some of its blocks.

    pipe.drafter = skip_layers(pipe.transformer, kept=(0, 1, 3, 4, 5))
    pipe.sampler = visual_spec.DraftedSampler(num_drafts=2)

Draft & Verify (Zhang et al., ACL 2024) and SWIFT (Xia et al., ICLR 2025) draft so; the first blocks alone are an early
exit. Verification makes the output exact whatever is skipped. Which blocks to keep is up to the model: SWIFT searches
for them while it decodes, here a person tries. Unlike theirs, this drafter has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from torch import nn

from visual_spec.models.next_token.llamagen import LlamaGenTransformer


def skip_layers(model: LlamaGenTransformer, kept: Sequence[int]) -> LlamaGenTransformer:
    """The model with the blocks `kept` alone. It shares their weights, and all others, with the model.

    Raises:
        ValueError: no block, one that the model lacks or out of order, or a model with a second head.
    """
    kept = list(kept)
    if model.num_answers > 1 or not kept or kept != sorted({*kept} & {*range(len(model.layers))}):
        raise ValueError(
            f"kept={kept} of a {type(model).__name__} with {len(model.layers)} blocks; pass rising numbers from 0 to "
            f"{len(model.layers) - 1}, of a model with one head"
        )
    fewer = copy(model)
    fewer._modules = {**model._modules, "layers": nn.ModuleList(model.layers[index] for index in kept)}
    fewer.register_to_config(num_layers=len(kept))
    return fewer
