"""Recipes of masked decoding as their public code computes them: plain loops, and tokens recorded from that code."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import hidden_counts, hidden_shares
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import LawByStep
from visual_spec.samplers.masked.presets import PRESETS

# -- the Halton sampler ------------------------------------------------------------------------------------------------

SIDE, CODES, STEPS = 4, 6, 5


class Formula:
    """A masked model of 4 x 4 slots whose logits are a formula of its tokens, the slot, the code and the label."""

    grid, vocab_size, mask_id = TokenGrid(SIDE, SIDE), CODES, CODES

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> MaskedState:
        return MaskedState(guided, torch.device("cpu"))

    def __call__(self, state: MaskedState, tokens: Tensor, stage: int) -> Tensor:
        count = SIDE * SIDE
        total = (tokens[..., 0].double() * torch.arange(1, count + 1)).sum(1)[:, None, None]
        slot, code = torch.arange(count).double()[:, None], torch.arange(CODES).double()
        labels = [3.0, 0.0] if state.guided else [3.0]
        return torch.cat(
            [0.8 * torch.sin(0.37 * total + 1.7 * slot + 2.3 * code + 0.9 * one) for one in labels]
        )


# Tokens of github.com/valeoai/Halton-MaskGIT, `HaltonSampler(w=2, step=5, ...)`, around this formula, with uniform
# numbers `uniform(slot, step)` in the place of its own: by (sm_temp_max, temp_warmup).
HALTON = {
    (1.0, 0): [3, 2, 4, 2, 4, 2, 3, 4, 4, 1, 1, 1, 2, 2, 2, 3],
    (2.0, 0): [4, 2, 3, 2, 4, 1, 3, 5, 1, 1, 0, 4, 2, 3, 2, 4],
    (1.0, 3): [5, 4, 3, 1, 4, 1, 3, 5, 3, 1, 0, 1, 2, 3, 2, 4],
    (1.2, 3): [5, 4, 3, 1, 4, 1, 3, 5, 3, 1, 0, 1, 2, 3, 2, 4],
    (3.0, 1): [4, 2, 3, 2, 4, 1, 3, 5, 1, 1, 0, 4, 2, 3, 2, 4],
    (2.0, 1): [4, 2, 3, 2, 4, 1, 3, 5, 1, 1, 0, 4, 2, 3, 2, 4],
}


def uniform(slots: Tensor, step: int) -> Tensor:
    return (12.9898 * torch.sin(78.233 * (slots.double() + 1) + 37.719 * step)).remainder(1)


@pytest.mark.parametrize(("largest", "warmup"), HALTON)
def test_halton_draws_the_tokens_of_the_public_code(monkeypatch, largest, warmup):
    """Its ramp multiplies the logits by 1 to 1.2; ours divides by a temperature that falls to 1 / 1.2."""

    def drawn(self: Any, laws: Tensor, slots: Tensor, stream: int, round: int = 0) -> Tensor:
        return (laws.exp().cumsum(-1) < uniform(slots, round)[..., None]).sum(-1).clamp(max=CODES - 1)

    monkeypatch.setattr(CounterNoise, "categorical", drawn)
    monkeypatch.setattr("visual_spec.samplers.masked.unmasking.fits", lambda logits: False)
    more: dict[str, Any] = dict(steps=STEPS, temperature="sharpening", last_temperature=1 / largest)
    sampler = PRESETS["halton"].sampler(**more, warmup=warmup)
    model: Any = Formula()
    found = sampler(model, None, law=TokenLaw(guidance_scale=3.0)).tokens[0]
    assert found.tolist() == HALTON[largest, warmup]


# -- text models -------------------------------------------------------------------------------------------------------


class Waves(Formula):
    """A row of slots, with logits that are higher, so that some laws are sure."""

    def __init__(self, length: int, height: float) -> None:
        self.grid, self.height = TokenGrid(1, length), height

    def __call__(self, state: MaskedState, tokens: Tensor, stage: int) -> Tensor:
        count = tokens.shape[1]
        total = (tokens[..., 0].double() * torch.arange(1, count + 1)).sum(1)[:, None, None]
        slot, code = torch.arange(count).double()[:, None], torch.arange(CODES).double()
        return self.height * torch.sin(0.37 * total + 1.7 * slot + 2.3 * code + 2.7)


# The likeliest tokens around these waves, and the calls at which they were kept, by (height, number): of
# github.com/NVlabs/Fast-dLLM (`generate(threshold=)`), of github.com/inclusionAI/dInfer
# (`get_transfer_index_dynamic(factor=)`, Fast-dLLM's, and `CreditThresholdParallelDecoder` with its defaults).
THRESHOLD = {
    (4, 0.5): "2410243521354102 0010010010000000",
    (9, 0.5): "2430243521354102 0000000000000000",
    (9, 0.9): "2432213241324322 1013010210410130",
}
FACTOR = {
    (4, 1.0): "2133223123124332 3516020465230361",
    (9, 0.5): "4413243411344424 3015010220140523",
    (9, 1.0): "0403233211104002 1021020220110200",
}
CREDIT = {
    (4, 0.7): "0430243521104102 1030020020110000",
    (9, 0.7): "2430243521354102 0000010000010000",
    (9, 0.9): "1410243521354102 2010010010110100",
}
# Of github.com/pixeli99/Prophet, `generate` (generate_earlyexit.py) with an answer of all five tokens.
COMMIT_GAPS = {
    (7.5, 5.0, 2.5): "42244 03241",
    (4.0, 3.0, 2.0): "42234 03231",
    (2.2, 1.6, 1.0): "41354 01111",
    (9.0, 4.5, 1.0): "42234 03231",
}


def likeliest(length: int, height: float, **settings: Any) -> tuple[list[int], list[int]]:
    """Tokens and calls, as the public code: scores are probabilities at temperature 1."""
    sampler = of_settings(
        MaskedSampler, length, schedule="linear", score="probability", score_temperature=1.0, **settings
    )
    drawn: Any = sampler(Waves(length, height), None, law=TokenLaw(temperature=0.0))
    calls = drawn.trace.entry_call[0, :, 0].tolist()
    assert int(drawn.trace.target_calls) == max(calls) + 1
    return drawn.tokens[0].tolist(), calls


def recorded(text: str) -> tuple[list[int], list[int]]:
    tokens, calls = text.split()
    return [*map(int, tokens)], [*map(int, calls)]


@pytest.mark.parametrize(("height", "least"), THRESHOLD)
def test_a_threshold_keeps_what_fast_dllm_keeps(height, least):
    assert likeliest(16, height, threshold=least) == recorded(THRESHOLD[height, least])


@pytest.mark.parametrize(("height", "factor"), FACTOR)
def test_a_factor_keeps_what_fast_dllm_keeps(height, factor):
    """Up to the end: its loop keeps the last token with the one before, however unsure it is."""
    tokens, calls = recorded(FACTOR[height, factor])
    found, own = likeliest(16, height, factor=factor)
    before = [slot for slot, call in enumerate(calls) if call < max(calls)]
    assert len(before) >= 9 and [slot for slot, call in enumerate(own) if call < max(calls)] == before
    for slot in before:
        assert (found[slot], own[slot]) == (tokens[slot], calls[slot])


@pytest.mark.parametrize(("height", "least"), CREDIT)
def test_credit_keeps_what_dinfer_keeps(height, least):
    assert likeliest(16, height, threshold=least, credit=0.7) == recorded(CREDIT[height, least])


@pytest.mark.parametrize("gaps", COMMIT_GAPS)
def test_all_is_kept_where_prophet_exits(gaps):
    assert likeliest(5, 9, commit_gaps=gaps) == recorded(COMMIT_GAPS[gaps])


# -- ReCAP on MaskGIT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [8, 16, 20, 24, 32])
def test_recap_keeps_as_many_tokens_as_its_script(steps):
    """The schedule of `cache_decoding.py`, written out: a step without a token takes one of the last step."""
    share = 1 - np.linspace(0, 1, steps + 1)[:-1] ** 2.5
    hidden = np.floor(share * 256).astype(int)
    kept = [int(a - b) for a, b in zip(hidden, hidden[1:], strict=False)]
    kept.append(256 - sum(kept))
    for index, number in enumerate(kept):
        if number == 0:
            kept[index] = 1
            kept[-1] -= 1
    counts = hidden_counts(hidden_shares("power_2.5", "recap", steps), "recap", torch.tensor([256]))
    assert [int(count) for count in counts] == [256 - sum(kept[:step]) for step in range(steps)]


# -- noise and temperature ---------------------------------------------------------------------------------------------


def test_noise_falls_as_each_code_lets_it():
    """Scales of the noise on equal scores, in closed form; Lumos-1 multiplies by what is left at every step."""
    steps = 4
    want = {
        "after": [3 / 4, 2 / 4, 1 / 4, 0],
        "before": [1, 3 / 4, 2 / 4, 1 / 4],
        "product": [math.prod(1 - (k + 1) / steps for k in range(step + 1)) for step in range(steps)],
        "full": [3 / 4, 2 / 4, 1 / 4, 0],
    }
    assert want["product"] == pytest.approx([3 / 4, 3 / 8, 3 / 32, 0])
    for falls, scales in want.items():
        assert LawByStep(falls=falls).left(steps) == pytest.approx(scales)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(temperature="sharpening", last_temperature=0.0), "last_temperature=0.0"),
        (dict(second_draw=True, score="entropy"), "second_draw=True.*score='entropy'"),
        (dict(second_draw=True, score="halton"), "second_draw=True.*score='halton'"),
        (
            dict(threshold=0.5, factor=1.0),
            "threshold and factor decide about the same tokens; pass one of them",
        ),
        (dict(commit_gaps=[1, 2]), r"commit_gaps=\(1, 2\); pass 3 numbers"),
        (
            dict(threshold=0.5, score="halton"),
            "threshold with score='halton', which is no probability of a draw",
        ),
        (dict(factor=0.5, score="entropy"), "factor with score='entropy'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    refuses(ValueError, words, of_settings, MaskedSampler, **settings)
