"""The accelerated head of a NextStep against its sampling step by step, and against numbers of the public code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visual_spec
from tests.helpers.nextstep import NextStep, conditions, filled
from tests.helpers.refusals import refuses

# Arguments, rows, and the last token of the public code (commit bfd14b5): `filled` weights, `conditions`, seed 5.
PUBLIC: tuple[tuple[dict[str, Any], int, tuple[float, ...]], ...] = (
    ({}, 8, (0.12197, -5.16677, -1.99084, -0.35436, 1.55492)),
    (dict(cfg=3.0), 8, (0.9386, -0.13728, -2.03511, -1.67978, -7.1345)),
    (dict(cfg=3.0, cfg2=1.5, num_sampling_steps=6), 12, (-0.80136, 0.93858, -0.03279, -1.52604, -6.0707)),
    (
        dict(cfg=2.0, timesteps_shift=3.0, num_sampling_steps=7, last_step_size=0.1),
        8,
        (0.57299, -2.01493, -0.28907, -0.25118, -3.63091),
    ),
    (dict(cfg=2.0, noise_repeat=2), 8, (1.55064, -1.63655, 0.58474, 0.02075, -5.01215)),
)


def model() -> Any:
    made = NextStep()
    filled(made.image_head)
    return made


def drawn(made: Any, rows: int, **arguments: Any) -> tuple[Tensor, Tensor]:
    """A batch of tokens, and what is drawn after them."""
    torch.manual_seed(5)
    return made.image_head.sample(conditions(rows), **arguments), torch.rand(3)


@pytest.mark.parametrize(("arguments", "rows", "last"), PUBLIC)
def test_tokens_and_later_draws_are_those_of_the_public_code(
    arguments: dict[str, Any], rows: int, last: tuple[float, ...]
) -> None:
    made = model()
    with torch.no_grad():
        expected, after = drawn(made, rows, **arguments)
    assert visual_spec.accelerate(made) is made
    for _ in range(2):  # the second token of a batch reads what the first has left
        token, then = drawn(made, rows, **arguments)
        torch.testing.assert_close(token, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(token[-1], torch.tensor(last), rtol=1e-4, atol=1e-4)
        assert torch.equal(then, after)
    steps = arguments.get("num_sampling_steps", 20)
    assert (made.last_trace.tokens, made.last_trace.head_calls) == (2, 2 * steps)


def test_in_bfloat16_the_promise_names_the_type_and_tokens_are_as_near_as_its_own() -> None:
    def token(made: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(5)
        with torch.no_grad():
            return made.image_head.sample(conditions(8).to(dtype), cfg=3.0).double()

    made = model()
    made.image_head.bfloat16()
    own = token(made, torch.bfloat16)
    made.image_head.float()  # the same numbers: what rounding makes of them is measured from there
    exact = token(made, torch.float32)
    made.image_head.bfloat16()
    visual_spec.accelerate(made)
    assert visual_spec.summary(made).endswith(
        "the same tokens up to rounding (bfloat16); nothing decoded yet"
    )
    found = token(made, torch.bfloat16)
    assert made.last_trace.low_precision == "bfloat16"
    assert visual_spec.summary(made).endswith("the tokens of its own code up to rounding (bfloat16)")
    assert 0 < (found - exact).abs().mean() < 2 * (own - exact).abs().mean()


def test_modulations_are_computed_once_a_token() -> None:
    made, calls = model(), []
    layer = made.image_head.net.res_blocks[0].adaLN_modulation[1]
    layer.register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    visual_spec.accelerate(made)
    drawn(made, 8, cfg=2.0)
    assert calls == [(20, 8, 48)]


def test_a_pipeline_is_its_model_and_restore_gives_back_what_was_there() -> None:
    made = model()
    pipe = SimpleNamespace(model=made)
    before = [set(vars(part)) for part in made.modules()]
    visual_spec.accelerate(visual_spec.accelerate(pipe))
    assert "nothing decoded yet" in visual_spec.summary(pipe)
    drawn(made, 4)
    assert "1 tokens in 20 evaluations" in visual_spec.summary(pipe)
    visual_spec.restore(pipe)
    assert [set(vars(part)) for part in made.modules()] == before
    assert "not accelerated" in visual_spec.summary(pipe)


def test_what_does_not_fit_is_refused() -> None:
    made = model()
    refuses(TypeError, "SpeculativeJacobiSampler", visual_spec.accelerate, made, "speculative-jacobi")
    assert "not accelerated" in visual_spec.summary(made)
    visual_spec.accelerate(made)
    refuses(ValueError, "noise_repeat=3", drawn, made, 8, noise_repeat=3)
    refuses(TypeError, "Linear.*NextStep", visual_spec.accelerate, nn.Linear(2, 2))
