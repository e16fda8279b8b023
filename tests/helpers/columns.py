"""Tabular models of columns, with the patterns and laws that tests draw from."""

from typing import Any

import torch

from tests.helpers.tabular import TabularColumnModel
from tests.helpers.tiny import seeded
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import SampleResult

LAW = TokenLaw()
LAWS = {
    "plain": LAW,
    "guided": TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=5, top_p=0.95),
    "guided halfway": TokenLaw(guidance_scale=4.0, top_k=5, guidance_until=9),
    "allowed": TokenLaw(allowed=(2, 6)),
    "greedy": TokenLaw(temperature=0.0),
}
FRAMES = 14
PATTERNS = {
    "musicgen": CodebookPattern.delay([0, 1, 2, 3]),
    "gap": CodebookPattern.delay([0, 3, 4]),
    "parallel": CodebookPattern.parallel(3),
    "partial flat": CodebookPattern.flat(3, [0, 1, 1]),
    "coarse first": CodebookPattern.coarse_first(3, [0, 1]),
}


def tabular(pattern: str = "musicgen", **changes) -> TabularColumnModel:
    arguments: dict[str, Any] = dict(order=1, conditions=3, dependence=0.15)
    return TabularColumnModel(PATTERNS[pattern].valid(FRAMES).T, 7, **{**arguments, **changes})


MODELS = {name: tabular(name) for name in PATTERNS}
MODEL = MODELS["musicgen"]
STEPS = MODEL.grid.num_tokens


def decode(
    sampler: Any, model: Any = MODEL, law: TokenLaw = LAW, rows: Any = range(4), **options
) -> SampleResult:
    """Samples 0, 1, ... of a model, decoded as one batch."""
    rows = list(rows)
    condition = torch.tensor([row % 3 for row in rows])
    generator = seeded(*(100 + row for row in rows))
    arguments = dict(law=law, generator=generator, batch_size=len(rows))
    return sampler(model, condition, **{**arguments, **options})


def poor(pattern: str = "musicgen") -> Any:
    """A model that knows `MODEL` poorly."""
    drafter = tabular(pattern, seed=8)
    drafter.logits = 0.6 * tabular(pattern).logits + 0.4 * drafter.logits
    return drafter


POOR = poor()
