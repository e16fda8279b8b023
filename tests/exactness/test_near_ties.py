"""Half precision: a wide matrix product rounds unlike a narrow one, so tokens may differ from AR's, at near-ties only.

The rule: feed the AR tokens of a bfloat16 run through the same model in wide windows. A slot where the wide call would
draw another token must be a near-tie: the two tokens' scores (law plus noise) lie closer than the two calls' rounding.
"""

from typing import Any

import torch

from tests.helpers.tiny import tiny_text_encoder, tiny_transformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

BATCH = 64
LAW = TokenLaw(guidance_scale=2.0)
PROMPTS = ["a red circle", "a blue square on a circle", "blue", "red square"] * (BATCH // 4)


def narrow_and_wide():
    """Scores (law plus the slot's noise) [B, L, V] of one-token calls and of one call over all slots."""
    model: Any = tiny_transformer(dim=64, vocab_size=40)
    model.to(torch.bfloat16)
    condition = tiny_text_encoder()(PROMPTS)
    run = AutoregressiveSampler()(
        model, condition, law=LAW, generator=torch.Generator().manual_seed(0), batch_size=BATCH
    )
    noise = CounterNoise(draw_keys(torch.Generator().manual_seed(0), BATCH), "cpu")
    slots = torch.arange(16).repeat(BATCH, 1)
    gumbel = noise.gumbel(slots, 40, TOKEN)

    def scores(window: int) -> torch.Tensor:
        state = model.prefill(condition, batch_size=BATCH, guided=True, window=window)
        parts = [state.logits[:, None]]
        for start in range(0, 15, window):
            at = slots[:, start : min(start + window, 15)]
            parts.append(model(state, run.tokens.gather(1, at), at))
        return LAW(torch.cat(parts, 1), guided=True) + gumbel

    return model, condition, run.tokens, scores(1), scores(15)


@torch.no_grad()
def test_wide_and_narrow_calls_in_bfloat16_disagree_at_near_ties_only():
    _, _, tokens, narrow, wide = narrow_and_wide()
    assert torch.equal(narrow.argmax(-1), tokens)
    rounding = (wide - narrow).abs().amax(-1)  # [B, L]
    assert 0 < rounding.max() < 0.3  # bfloat16 has 8 bits; guidance doubles what they lose
    chosen = wide.argmax(-1)
    gap = (narrow.gather(-1, tokens[..., None]) - narrow.gather(-1, chosen[..., None])).squeeze(-1)
    assert ((chosen == tokens) | (gap <= 2 * rounding)).all()
    # Without the rule the claim would be empty: most slots are no near-ties, and there the tokens are equal.
    top = narrow.topk(2, -1).values
    clear = top[..., 0] - top[..., 1] > 2 * rounding
    assert clear.float().mean() > 0.8 and torch.equal(chosen[clear], tokens[clear])


@torch.no_grad()
def test_the_first_token_that_differs_in_bfloat16_is_a_near_tie():
    model, condition, tokens, narrow, wide = narrow_and_wide()
    sampler = SpeculativeJacobiSampler(window=8)
    fast = sampler(
        model, condition, law=LAW, generator=torch.Generator().manual_seed(0), batch_size=BATCH
    ).tokens
    bound = 4 * (wide - narrow).abs().max()  # windows of 8 round in their own way, by about as much
    for row in range(BATCH):
        differs = (fast[row] != tokens[row]).nonzero()
        if len(differs):
            slot = int(differs[0])
            assert narrow[row, slot, tokens[row, slot]] - narrow[row, slot, fast[row, slot]] < bound
    assert (fast == tokens).all(1).float().mean() > 0.5
