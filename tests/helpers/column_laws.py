"""Exact laws of columns, and the samplers whose output they must equal."""

from typing import Any

import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN
from tests.helpers.statistics import p_value
from tests.helpers.tabular import TabularColumnModel
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.samplers.core.law import TokenLaw

PATTERNS = {
    "delay": CodebookPattern.delay([0, 1]).valid(2).T,  # S = 3, 4 tokens
    "parallel": CodebookPattern.parallel(2).valid(3).T,  # S = 3, 6 tokens
    "longer delay": CodebookPattern.delay([0, 1]).valid(3).T,  # S = 4, 6 tokens
    # S = 4, codebook 1 starts when codebook 0 has ended.
    "delay of two": CodebookPattern.delay([0, 2]).valid(2).T,
    "partial flat": CodebookPattern.flat(3, [0, 1, 1]).valid(2).T,  # S = 4, 6 tokens
    "three codebooks": CodebookPattern.delay([0, 1, 2]).valid(2).T,  # S = 4, 6 tokens
}


def model(pattern: str = "longer delay", vocab_size: int = 2, **changes) -> TabularColumnModel:
    return TabularColumnModel(PATTERNS[pattern], vocab_size, **changes)


def with_tries(sampler: Any, tries: int) -> Any:
    """A sampler with so many tries at the residual of a column: every one is a draw of each codebook and two more."""
    sampler.tries = tries
    return sampler


LAWS = {
    "guidance": TokenLaw(guidance_scale=2.5),
    "guidance of two steps": TokenLaw(guidance_scale=2.5, guidance_until=2),
    "top-k": TokenLaw(top_k=2),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9),
}


def one_by_one(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    at = drafts[..., None]
    ratio = (target.gather(-1, at) - draft_law.gather(-1, at)).exp().clamp(max=1)
    return ratio.squeeze(-1).prod(-1)


SAMPLES = 100_000
STATISTICAL = TabularColumnModel(PATTERNS["longer delay"], 3, dtype=torch.float32)


def p_of(sampler, seed: int = 0) -> float:
    valid = STATISTICAL.valid
    powers = 3 ** torch.arange(int(valid.sum()) - 1, -1, -1)
    total = torch.zeros(3 ** len(powers), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(SAMPLES // 50_000):
        tokens = sampler(STATISTICAL, None, law=PLAIN, generator=generator, batch_size=50_000).tokens
        total += torch.bincount(tokens[:, valid] @ powers, minlength=len(total))
    return p_value(total, STATISTICAL.law_of_sequences(PLAIN))
