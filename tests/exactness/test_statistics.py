"""Whole decodes with the real noise: V = 4, L = 5, 4e5 samples as rows of the sampler, chi-square against the law."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.planted import batch_minimum_step, old_label_step
from tests.helpers.statistics import LEAST_P, p_value
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SAMPLES, ROWS = 400_000, 50_000
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
MODEL = TabularModel(TokenGrid(1, 5), 4, dtype=torch.float32)
LAW = TokenLaw()

COMBINATIONS: dict[str, Any] = {
    "gumbel-identical": dict(coupling="gumbel", acceptance="identical", initial_draft="last_law"),
    "gumbel-exact": dict(coupling="gumbel", acceptance="exact", initial_draft="uniform"),
    "independent-exact": dict(coupling="independent", acceptance="exact", initial_draft="uniform"),
    "maximal-exact": dict(coupling="maximal", acceptance="exact", initial_draft="uniform"),
}


pytestmark = pytest.mark.usefixtures("keys_in_bulk")


def counts(sampler, seed: int) -> Tensor:
    """How often each of the V ** L sequences comes out."""
    # One stream of keys for all chunks: chunk and row play no part.
    generator = torch.Generator().manual_seed(seed)
    powers = MODEL.vocab_size ** torch.arange(MODEL.grid.num_tokens - 1, -1, -1)
    total = torch.zeros(MODEL.vocab_size**MODEL.grid.num_tokens, dtype=torch.long)
    for _ in range(SAMPLES // ROWS):
        result = sampler(MODEL, None, law=LAW, generator=generator, batch_size=ROWS)
        total += torch.bincount(result.tokens @ powers, minlength=len(total))
    return total


def p_of(sampler, seed: int = 0) -> float:
    return p_value(counts(sampler, seed), MODEL.law_of_sequences(LAW))


def test_the_test_accepts_the_law_itself_and_rejects_a_close_one():
    law = MODEL.law_of_sequences(LAW).double()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(law, SAMPLES, replacement=True, generator=generator)
    observed = torch.bincount(drawn, minlength=len(law))
    assert p_value(observed, law) > LEAST_P
    tilted = law * (1 + 0.1 * torch.randn(len(law), generator=generator, dtype=torch.float64)).clamp(min=0)
    assert p_value(observed, tilted / tilted.sum()) < LEAST_P


def test_autoregressive_sampling_follows_the_law():
    assert p_of(AutoregressiveSampler()) > LEAST_P


@pytest.mark.fast_sets(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_follows_the_law(name, seed):
    assert p_of(SpeculativeJacobiSampler(3, **COMBINATIONS[name]), seed) > LEAST_P


def test_fails_on_an_old_label_after_an_accept(monkeypatch):
    monkeypatch.setattr(SpeculativeJacobiSampler, "step", old_label_step)
    assert p_of(SpeculativeJacobiSampler(3, **COMBINATIONS["maximal-exact"])) < LEAST_P


def test_fails_on_a_batch_minimum(monkeypatch):
    monkeypatch.setattr(SpeculativeJacobiSampler, "step", batch_minimum_step)
    assert p_of(SpeculativeJacobiSampler(3, **COMBINATIONS["independent-exact"])) < LEAST_P
