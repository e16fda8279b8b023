"""The chosen window is the one with the most tokens a second; the tokens are plain sampling's whatever it is."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.samplers.test_columns import MODEL as COLUMNS
from tests.tiny import seeded, tiny_pipeline
from visual_spec.samplers.autoregressive import AutoregressiveSampler
from visual_spec.samplers.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.columns_jacobi import COLUMN_DRAFTS, ColumnJacobiSampler
from visual_spec.samplers.core import window
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.window import WindowPolicy
from visual_spec.samplers.jacobi import SpeculativeJacobiSampler

PROMPTS = ["a red square", "a blue circle", "red"]


def fed(chances: list[float], widths: list[int], calls: int = 4000) -> WindowPolicy:
    """A policy that saw runs in which the draft at place j is kept with `chances[j - 1]`."""
    policy, rng = WindowPolicy((1, 2, 4, 8)), np.random.default_rng(0)
    for call in range(calls):
        width = widths[call % len(widths)]
        kept = rng.random((20, width - 1)) < chances[: width - 1]
        policy.saw(width, 1 + kept.cumprod(1).sum(1), 1.0)
    return policy


@pytest.mark.parametrize("widths", [[8], [2, 4, 8], [1, 8]])
def test_expected_tokens_are_those_of_all_outcomes(widths):
    chances = [0.9, 0.8, 0.5, 0.7, 0.6, 0.5, 0.4]
    found = fed(chances, widths).tokens
    for width in range(1, 9):
        expected = 0.0
        for kept in product([0, 1], repeat=width - 1):
            weight = np.prod([c if k else 1 - c for c, k in zip(chances, kept, strict=False)])
            expected += weight * (1 + np.cumprod(kept).sum())
        assert abs(found[width - 1] - expected) < 0.15, width  # the last 20 calls or so count


def test_a_narrow_window_tells_what_a_wider_one_would_give():
    found = fed([0.8] * 7, [4]).tokens
    expected = [sum(0.8**j for j in range(width)) for width in range(1, 9)]
    assert np.abs(found - expected).max() < 0.3 and found[7] > found[3] + 1


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 8),  # the wider the better, where it costs nothing
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, 1),  # every slot at full price
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 4.0}, 4),
    ],
)
def test_the_choice_weighs_tokens_against_seconds(seconds, best):
    policy = fed([0.8] * 7, [8])
    policy.seconds.clear()
    policy.seconds.update({width: [value] for width, value in seconds.items()})
    tokens = [sum(0.8**j for j in range(width)) for width in seconds]
    assert max(seconds, key=lambda w: tokens[list(seconds).index(w)] / seconds[w]) == best  # by hand
    assert policy.choose() == best


def timed(seconds: dict[int, list[float]]) -> WindowPolicy:
    """A policy that saw calls of these seconds, in this order; a window of 2 commits 2 tokens, one of 1 commits 1."""
    policy = WindowPolicy(tuple(seconds))
    for width, values in seconds.items():
        for value in values:
            policy.saw(width, np.full(20, width), value)
    return policy


def test_the_first_call_of_a_window_is_not_timed():
    assert timed({1: [0.01, 1.0], 2: [0.01, 4.0]}).choose() == 1
    assert timed({1: [0.01, 1.0], 2: [99.0, 1.0]}).choose() == 2
    assert timed({1: [99.0, 1.0], 2: [0.01, 4.0]}).choose() == 1
    # Nor does a later one leave in its place: the median is that of 1, 9, 9.
    assert timed({1: [0.01, 4.0], 2: [0.01, 1.0, 9.0, 9.0]}).choose() == 1


def test_old_timings_are_forgotten():
    slow, fast = [0.01, *7 * [1.0], *7 * [9.0]], [0.01, *7 * [9.0], *7 * [1.0]]
    assert timed({1: [0.01, 3.0], 2: slow}).choose() == 1
    assert timed({1: [0.01, 3.0], 2: fast}).choose() == 2
    # Seven calls count, no fewer: four slow ones outweigh three fast ones, the other way round they do not.
    assert timed({1: [0.01, 3.0], 2: [0.01, *4 * [9.0], *3 * [1.0]]}).choose() == 1
    assert timed({1: [0.01, 3.0], 2: [0.01, *3 * [9.0], *4 * [1.0]]}).choose() == 2


def test_every_window_is_timed_before_any_is_preferred():
    policy, seen = WindowPolicy((1, 2, 4)), []
    for _ in range(6):
        seen.append(policy.choose())
        policy.saw(seen[-1], np.array([1]), 1.0)
    assert seen == [4, 4, 2, 2, 1, 1]


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("prices", ["real", "flat", "steep", "changing"])
def test_tokens_are_those_of_plain_sampling(monkeypatch, prices, guidance_scale):
    """Whatever is chosen: by the clock of this machine, always the widest, always the narrowest, another every time."""
    widths: list[int] = []
    if prices == "changing":
        order = np.random.default_rng(0).choice([1, 2, 4, 8, 16], 500).tolist()
        monkeypatch.setattr(
            WindowPolicy, "choose", lambda self: widths.append(order[len(widths)]) or widths[-1]
        )
    elif prices != "real":
        known = {w: [1.0 if prices == "flat" else float(w) ** 2] for w in window.WIDTHS}
        monkeypatch.setattr(WindowPolicy, "saw", lambda *_: None)
        policy = WindowPolicy()
        policy.seconds.update(known)
        monkeypatch.setattr(WindowPolicy, "of", classmethod(lambda cls, *_: policy))
    pipe = tiny_pipeline(AutoregressiveSampler())
    asked: Any = dict(output_type="latent", guidance_scale=guidance_scale)
    plain = pipe(PROMPTS, generator=seeded(1, 2, 3), **asked).images
    pipe.sampler = SpeculativeJacobiSampler(window="auto")
    for _ in range(2):
        output = pipe(PROMPTS, generator=seeded(1, 2, 3), **asked)
        assert torch.equal(output.images, plain)
        if prices == "steep":
            assert output.trace.target_calls.tolist() == [16] * 3
        if prices == "flat":
            assert output.trace.target_calls.max() < 16
    alone = pipe(PROMPTS[1], generator=seeded(2), **asked)
    assert torch.equal(alone.images, plain[1:2])


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("prices", ["real", "changing"])
def test_columns_are_those_of_plain_sampling(monkeypatch, prices, guidance_scale):
    widths: list[int] = []
    if prices == "changing":
        order = np.random.default_rng(0).choice([1, 2, 4, 8, 16], 500).tolist()
        monkeypatch.setattr(
            WindowPolicy, "choose", lambda self: widths.append(order[len(widths)]) or widths[-1]
        )
    asked: Any = dict(law=TokenLaw(guidance_scale=guidance_scale), batch_size=3)
    condition = torch.tensor([1, 0, 2])
    plain = ColumnAutoregressiveSampler()(COLUMNS, condition, generator=seeded(1, 2, 3), **asked)
    for initial_draft in COLUMN_DRAFTS:
        sampler = ColumnJacobiSampler("auto", initial_draft=initial_draft)
        found = sampler(COLUMNS, condition, generator=seeded(1, 2, 3), **asked)
        assert torch.equal(found.tokens, plain.tokens)
        assert found.trace.commit_call.shape == plain.trace.commit_call.shape
        if prices == "changing":  # every call commits at most its own window
            for row in range(3):
                per_call = torch.bincount(found.trace.commit_call[row])[1:].tolist()
                assert all(count <= width for count, width in zip(per_call, widths, strict=False))
            assert found.trace.target_calls.max() < plain.trace.target_calls.max()
        widths.clear()
    alone = ColumnJacobiSampler("auto")(
        COLUMNS, condition[1:2], generator=seeded(2), **{**asked, "batch_size": 1}
    )
    assert torch.equal(alone.tokens, plain.tokens[1:2])


def test_what_was_timed_is_remembered_by_model_and_batch():
    model = torch.nn.Linear(1, 1)
    first = WindowPolicy.of(model, (1, False, "cpu"))
    for seconds in (0.7, 0.5):
        first.saw(4, np.array([2]), seconds)
    assert WindowPolicy.of(model, (1, False, "cpu")).seconds == {4: [0.5]}
    assert WindowPolicy.of(model, (2, False, "cpu")).seconds == {}
    assert WindowPolicy.of(torch.nn.Linear(1, 1), (1, False, "cpu")).seconds == {}


def test_a_window_that_depends_on_time_is_refused_where_tokens_would():
    with pytest.raises(ValueError, match="depend on measured times"):
        SpeculativeJacobiSampler(window="auto", acceptance="exact")
    with pytest.raises(ValueError, match="or 'auto'"):
        SpeculativeJacobiSampler(window="wide")
    for settings in (dict(acceptance="exact"), dict(acceptance="grouped", unit="codebook")):
        with pytest.raises(
            ValueError, match="depend on measured times.*Pass acceptance='identical', or a number"
        ):
            ColumnJacobiSampler(window="auto", **settings)
    with pytest.raises(ValueError, match="window='wide'; pass an integer of at least 1, or 'auto'"):
        ColumnJacobiSampler(window="wide")
