"""Log-probabilities of the tokens of all scales: their sum is that of the picture, from the definition."""

from typing import Any

import pytest
import torch

from tests.helpers.scale_laws import every_sequence, parts, product_law
from tests.helpers.tiny import seeded
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage

PLAIN = TokenLaw()
GUIDED = TokenLaw(guidance_scale=1.8, temperature=0.8, top_k=2)
NEAR: dict[str, Any] = dict(rtol=0, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("law", [PLAIN, GUIDED])
@pytest.mark.parametrize("shape", ["3 ** 5", "2 ** 9"])
@pytest.mark.parametrize("settings", [{}, {"ramp": False}, {"measure": True}], ids=str)
@pytest.mark.parametrize("large", [None, 1])
def test_they_make_up_the_law_of_the_picture(large, settings, shape, law):
    """Also where a small model draws the later scales: under the model that drew each."""
    tokenizer, models = parts(shape, 2)
    count = len(tokenizer.scales)
    model: Any = models[0]
    drawing, laws = [models[0]] * count, [law] * count
    if large is not None:
        own = TokenLaw(guidance_scale=1.3)
        model = [Stage(models[0], range(large)), Stage(models[1], range(large, count), own)]
        drawing = [models[0]] * large + [models[1]] * (count - large)
        laws = [law] * large + [own] * (count - large)
    sampler: Any = ScaleWiseSampler(**settings)
    request: dict[str, Any] = dict(law=law, batch_size=6, tokenizer=tokenizer)
    found = sampler(model, None, generator=seeded(*range(6)), output_logprobs=True, **request)
    plain = sampler(model, None, generator=seeded(*range(6)), **request)
    assert torch.equal(found.tokens, plain.tokens) and plain.trace.logprobs is None
    assert found.trace.logprobs.shape == found.tokens.shape and found.trace.logprobs_law == "drawn"
    assert found.trace.model_calls == plain.trace.model_calls
    sequences = every_sequence(tokenizer)
    index = [int((sequences == row).all(1).nonzero()) for row in found.tokens]
    ramp = settings.get("ramp", True)
    for kept, asked in (
        (found.trace.logprobs, product_law(tokenizer, drawing, laws, ramp)),
        (found.trace.model_logprobs, product_law(tokenizer, drawing, [PLAIN] * count)),
    ):
        torch.testing.assert_close(kept.sum(1), asked.log()[index], **NEAR)


def test_mixtures_of_codes_are_no_draws_and_schedules_give_what_they_drew():
    tokenizer, models = parts("2 ** 9")
    request: dict[str, Any] = dict(law=GUIDED, batch_size=3, tokenizer=tokenizer, output_logprobs=True)
    smooth: Any = ScaleWiseSampler(smooth=True)(models[0], None, generator=seeded(0, 1, 2), **request)
    assert smooth.trace.logprobs_law == "target" and smooth.trace.logprobs.shape == (3, 9)
    cut: Any = ScaleWiseSampler(schedule={"stop_after": 1})(
        models[0], None, generator=seeded(0, 1, 2), **request
    )
    whole: Any = ScaleWiseSampler()(models[0], None, generator=seeded(0, 1, 2), **request)
    assert cut.trace.logprobs.shape == cut.tokens.shape == (3, 5)
    assert torch.equal(cut.trace.logprobs, whole.trace.logprobs[:, :5])
