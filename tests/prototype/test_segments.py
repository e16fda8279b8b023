"""Long clips in MMPL's order: the chain of plans, the fill in one batch, and their calls."""

import pytest
import torch

from tests.helpers.llamagen import condition
from tests.helpers.tiny import seeded, tiny_frame_transformer
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.prototype.segments import draw_segments
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.frames import FrameMaskedSampler

MASK, LAW, SAMPLER = 12, TokenLaw(guidance_scale=2.0), FrameMaskedSampler(3, 0.5)


def planned_model():
    return tiny_frame_transformer(num_frames=5, key_frames=[2, 4]).double()


def rows(samples: list[int]):
    """The condition of n rows of each of these samples, side by side."""
    whole = condition(2)

    def of(copies: int) -> TextCondition:
        index = torch.tensor(samples).repeat_interleave(copies)
        return TextCondition(whole.features[index], whole.mask[index])

    return of


def test_plans_are_chained_and_the_rest_is_filled_at_once():
    """Against one sample and one segment after the other, each drawn by the sampler alone."""
    model = planned_model()
    tokens, trace = draw_segments(model, SAMPLER, rows([0, 1]), 3, law=LAW, generator=seeded(7, 8))
    assert tokens.shape == (2, 3 * 4 + 1, 4)
    assert trace.plan_calls == [3 + 1 + 3, 1 + 3, 1 + 3] and trace.fill_calls == 1 + 1 + 3
    assert trace.waiting_calls == 7 + 4 + 4 + 5
    for sample in range(2):
        (generator,) = seeded(7 + sample)
        own, first, plans = rows([sample])(1), torch.full((1, 4), MASK), []
        for _ in range(3):
            given = torch.full((1, 5, 4), MASK)
            given[:, 0] = first
            alone = SAMPLER(
                model, own, known_tokens=given.flatten(1), law=LAW, generator=[generator], batch_size=1
            )
            plan = alone.tokens.view(1, 5, 4)
            plan[:, [1, 3]] = MASK
            plans.append(plan)
            first = plan[:, 4]
        for segment, plan in enumerate(plans):
            filled = SAMPLER(
                model, own, known_tokens=plan.flatten(1), law=LAW, generator=[generator], batch_size=1
            ).tokens.view(5, 4)
            assert torch.equal(tokens[sample, 4 * segment : 4 * segment + 5], filled)


def test_other_requests_are_refused():
    with pytest.raises(ValueError, match="segments=0"):
        draw_segments(planned_model(), SAMPLER, rows([0]), 0, law=LAW, generator=seeded(0))
    with pytest.raises(ValueError, match="key_frames"):
        draw_segments(tiny_frame_transformer(), SAMPLER, rows([0]), 2, law=LAW, generator=seeded(0))
