"""The reference sampler. Its refusals are tested with those of the Jacobi sampler."""

import torch

from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

MODEL = TabularModel(TokenGrid(3, 4), 7, order=2, conditions=3)
LAW = TokenLaw(guidance_scale=2.0, top_k=5)
CONDITION = torch.tensor([1, 2])


def decode(**options):
    generator = torch.Generator().manual_seed(0)
    return AutoregressiveSampler()(MODEL, CONDITION, law=LAW, generator=generator, batch_size=2, **options)


def test_draws_each_token_from_its_law_with_the_noise_of_its_slot():
    """Against a loop written from the definition."""
    noise = CounterNoise(draw_keys(torch.Generator().manual_seed(0), 2), "cpu")
    expected = torch.zeros(2, 0, dtype=torch.long)
    for slot in range(12):
        context = torch.zeros(2, dtype=torch.long)
        for token in expected[:, -2:].T:
            context = 7 * context + token
        rows = torch.cat([MODEL.logits[CONDITION, slot, context], MODEL.logits[3, slot, context]])
        gumbel = noise.gumbel(torch.full((2, 1), slot), 7, TOKEN, dtype=torch.float64)
        token = (LAW(rows[:, None], True) + gumbel).argmax(-1)
        expected = torch.cat([expected, token], 1)
    assert torch.equal(decode().tokens, expected)


def test_trace_is_one_call_a_token():
    calls = []
    result = decode(callback=lambda call, lengths: calls.append((call, lengths.tolist())))
    assert calls == [(slot, [slot + 1, slot + 1]) for slot in range(12)]
    assert result.trace.target_calls.tolist() == [12, 12]
    assert torch.equal(result.trace.commit_call, torch.arange(12).expand(2, -1))
    assert result.trace.tokens_per_call.tolist() == [1, 1]
    assert (
        result.trace.lossless and result.trace.identical and result.trace.sampler == "AutoregressiveSampler"
    )
    assert set(result.trace.phase_seconds) == {"prefill", "model", "verify"}


def test_keeps_no_graph():
    assert not decode().tokens.requires_grad
    model = TabularModel(TokenGrid(2, 2), 3)
    model.logits.requires_grad_(True)
    AutoregressiveSampler()(model, None, law=TokenLaw())
    assert model.logits.grad is None
