"""Drawing from laws in one kernel: the operators against `TokenLaw` and `CounterNoise`, the kernels against both.

That the law itself is right is the matter of tests/samplers/core/test_law.py.
"""

import math
from typing import Any

import pytest
import torch

from tests.kernels.laws import LAWS, window
from visual_spec.kernels.draw import draw
from visual_spec.kernels.law import LawNumbers
from visual_spec.kernels.masked_sample import masked_sample
from visual_spec.samplers.core.law import TokenLaw, non_finite


@pytest.mark.parametrize("name", LAWS)
def test_draws_what_the_samplers_draw(name):
    here = window(LAWS[name], 3, 5, 130)
    for stream, round in [(0, 0), (3, 17)]:
        address: dict[str, Any] = dict(stream=stream, round=round)
        tokens, finite, none = draw(here.logits, here.keys, here.slots, here.numbers, **address)
        assert torch.equal(tokens, here.noise.categorical(here.target, here.slots, stream, round))
        assert finite.all() and none.shape == (0,)
        again, _, margins = draw(here.logits, here.keys, here.slots, here.numbers, **address, margins=True)
        scores = here.target + here.noise.gumbel(here.slots, 130, stream, round)
        best = scores.sort(-1, descending=True).values
        assert torch.equal(again, tokens)
        first, stop = here.numbers.first, here.numbers.stop
        rows = here.logits[..., first:stop].flatten(0, 1).tolist()
        largest = torch.tensor([max(abs(one) for one in row if math.isfinite(one)) for row in rows])
        parts = largest.view(here.logits.shape[:2]).split(len(here.keys))
        weights = (
            (here.numbers.guidance_scale, abs(here.numbers.guidance_scale - 1)) if len(parts) > 1 else (1.0,)
        )
        units = sum(weight * row for weight, row in zip(weights, parts, strict=True))
        torch.testing.assert_close(margins * units, best[..., 0] - best[..., 1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_read_as_float32(dtype):
    here = window(LAWS["both"], dtype=dtype)
    tokens, _, _ = draw(here.logits, here.keys, here.slots, here.numbers, stream=0)
    assert torch.equal(tokens, here.noise.categorical(here.target, here.slots, 0))


def test_top_p_near_one_keeps_what_top_k_left():
    """The float32 sum of the mass can end below top_p; the filter must then not fall back on the whole vocabulary."""
    here = window(TokenLaw(top_k=50, top_p=1 - 1e-8), 20, 4, 1000)
    assert (here.target.isfinite().sum(-1) <= 50).all()


def test_says_which_logits_define_no_law():
    here = window(TokenLaw(guidance_scale=2.0, allowed=(3, 31)), 2, 3)
    here.logits[0, 0, 5] = torch.nan
    here.logits[1, 1, 30] = torch.inf
    here.logits[2, 2, 3:31] = -torch.inf  # an unconditional row
    here.logits[3, 0, 31:] = torch.nan  # outside the allowed ids
    tokens, finite, _ = draw(here.logits, here.keys, here.slots, here.numbers, stream=0)
    assert finite.tolist() == [[False, True, False], [True, False, True]]
    assert torch.equal(~finite, non_finite(here.logits[..., 3:31]).view(2, 2, 3).any(0))
    assert ((tokens >= 3) & (tokens < 31)).all()


def test_masked_sample_gives_the_probability_of_its_draw():
    for name in LAWS:
        here = window(LAWS[name], 2, 4, 130, seed=3)
        tokens, log_probs, log_kept, finite = masked_sample(
            here.logits, here.keys, here.slots, here.numbers, stream=1, round=5
        )
        assert finite.all()
        assert torch.equal(tokens, here.noise.categorical(here.target, here.slots, 1, 5))
        at = tokens[..., None]
        torch.testing.assert_close(log_probs, here.target.gather(-1, at)[..., 0], rtol=0, atol=2e-6)
        # The mass that the filters keep: of the law without them, which for a greedy one is that of temperature 1.
        law = here.law
        open_law = TokenLaw(
            guidance_scale=law.guidance_scale,
            temperature=law.temperature or 1.0,
            allowed=law.allowed,
            guidance_until=law.guidance_until,
        )
        whole = open_law(here.logits, law.guided, here.slots).exp()
        kept = (whole * here.target.isfinite()).sum(-1)
        torch.testing.assert_close(log_kept.exp(), kept, rtol=0, atol=2e-6)
        if name in ("plain", "guided", "until"):
            assert torch.equal(log_kept.abs() < 1e-6, torch.ones_like(finite))


@pytest.mark.parametrize("op", [draw, masked_sample])
def test_operators_are_opaque_to_the_compiler(op):
    here = window(LAWS["both"])

    def step(logits, slots):
        return op(logits * 1.0, here.keys, slots + 0, here.numbers, stream=0, round=2)

    expected = step(here.logits, here.slots)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(here.logits, here.slots)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_operators_pass_the_checks_of_pytorch():
    here = window(LAWS["both"])
    arguments = (here.logits, here.keys, here.slots, torch.tensor(3), 0, *here.numbers)
    for name in ("draw", "masked_sample"):
        op = getattr(torch.ops.visual_spec, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"keys": torch.zeros(3, dtype=torch.long)}, ValueError, r"keys.*\(3,\).*\(2, 3\)"),
        ({"logits": torch.zeros(2, 3, 37)}, ValueError, r"\(2, 3, 37\)"),
        ({"logits": torch.zeros(4, 3, 37).double()}, TypeError, r"torch\.float64"),
        ({"round": torch.zeros(2, dtype=torch.long)}, ValueError, r"round.*\(2,\)"),
        ({"law": LawNumbers(True, 2.0, 1.0, 0, 1.0, 5, 40)}, ValueError, r"ids \(5, 40\)"),
    ],
)
def test_refusals(change, error, message):
    here = window(LAWS["both"])
    arguments = dict(logits=here.logits, keys=here.keys, slots=here.slots, law=here.numbers, stream=0)
    with pytest.raises(error, match=message):
        draw(**{**arguments, **change})
