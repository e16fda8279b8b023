"""What masked decoding says of its own parallelism, against exact sums over groups, orders and outcomes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.helpers.tabular import TabularMaskedModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.state import MaskedTrace

LENGTH, CODES = 3, 3


def laws(model: TabularMaskedModel, tokens: list[int], temperature: float) -> Tensor:
    state = model.prepare(None, batch_size=1, guided=False)
    return (model(state, torch.tensor(tokens)[None, :, None], 0)[0] / temperature).softmax(-1)


def exact(model: TabularMaskedModel, temperature: float) -> tuple[float, float]:
    """The means over orders and draws of the summed total variations and log ratios, for one group of all tokens."""
    hidden = [CODES] * LENGTH
    first = laws(model, hidden, temperature)
    moved = ratio = 0.0
    orders = list(itertools.permutations(range(LENGTH)))
    for outcome in itertools.product(range(CODES), repeat=LENGTH):
        weight = math.prod(float(first[slot, token]) for slot, token in enumerate(outcome)) / len(orders)
        for order in orders:
            known = list(hidden)
            for slot in order:
                given = laws(model, known, temperature)[slot]
                moved += weight * float((first[slot] - given).clamp(min=0).sum())
                ratio += weight * math.log(float(first[slot, outcome[slot]] / given[outcome[slot]]))
                known[slot] = outcome[slot]
    return moved, ratio


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_estimates_have_the_exact_means(keys_in_bulk, temperature):
    model, rows = TabularMaskedModel(TokenGrid(1, LENGTH), CODES), 20_000
    sampler = MaskedSampler(1, measure=True)
    generator = torch.Generator().manual_seed(0)
    trace = sampler(
        model, None, law=TokenLaw(temperature=temperature), generator=generator, batch_size=rows
    ).trace
    assert isinstance(trace, MaskedTrace) and trace.moved_mass is not None
    assert trace.total_correlation is not None
    for found, wanted in zip(
        (trace.moved_mass, trace.total_correlation), exact(model, temperature), strict=True
    ):
        error = float(found.double().std()) / rows**0.5
        assert abs(float(found.double().mean()) - wanted) < 4 * error and 4 * error < 0.1 * wanted
    assert trace.divergence == pytest.approx(float(trace.moved_mass.mean()) / LENGTH, rel=1e-4)
    assert "a slot from one token a call" in trace.summary()


def test_one_token_a_call_moves_nothing_and_measuring_changes_no_token():
    model = TabularMaskedModel(TokenGrid(1, 4), 3)
    for steps in (4, 2):
        plain, measured = (
            MaskedSampler(steps, schedule="linear", measure=measure)(
                model,
                None,
                law=TokenLaw(guidance_scale=2.0),
                generator=torch.Generator().manual_seed(1),
                batch_size=64,
            )
            for measure in (False, True)
        )
        assert torch.equal(plain.tokens, measured.tokens)
        assert torch.equal(plain.trace.target_calls, measured.trace.target_calls)
        assert plain.trace.divergence is None and measured.trace.divergence is not None
        assert (measured.trace.divergence == 0) == (steps == 4)
        assert measured.trace.phase_seconds.keys() > plain.trace.phase_seconds.keys()
