"""FreeDave: the tokens of masked decoding step by step, in as many calls as the public code makes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.freedave import FreeDaveSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import HostCopy
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, LawByStep, Schedule

LAW = TokenLaw(guidance_scale=2.0, temperature=0.8)
LINEAR = Schedule(schedule="linear")
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "one token a step": dict(steps=12, schedule=LINEAR),
    "halton": dict(steps=8, choice=Choice(score="halton")),
    "noise on the score": dict(choice=Choice(choice_temperature=3.0)),
    "a law that changes": dict(by_step=LawByStep("falling", guidance="rising", guided_steps=5, warmup=2)),
    "credit": dict(steps=12, schedule=LINEAR, by_step=LawByStep(credit=0.7)),
    "threshold": dict(steps=12, schedule=Schedule(threshold=0.7), choice=Choice(score="probability")),
    "entropy bound": dict(steps=12, schedule=Schedule(entropy_bound=0.5)),
    "gaps": dict(
        steps=12, schedule=Schedule(commit_gaps=(4.0, 3.0, 2.0)), choice=Choice(score_temperature=1.0)
    ),
    "second draw, greedy": dict(choice=Choice(greedy=True, second_draw=True)),
}


class Sums:
    """A masked model of 12 tokens whose logits are sums over what is visible: what the public code was run on."""

    grid, vocab_size, mask_id = TokenGrid(3, 4), 6, 6

    def __init__(self, seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.bias = torch.randn(12, 6, generator=generator, dtype=torch.float64) * 1.5
        self.weights = torch.randn(12, 7, 12, 6, generator=generator, dtype=torch.float64) * scale
        self.calls = 0

    def prepare(self, condition: Any, *, batch_size: int, guided: bool) -> Any:
        return SimpleNamespace(guided=guided, device=torch.device("cpu"), select=lambda samples: None)

    def __call__(self, state: Any, tokens: Tensor, stage: int) -> Tensor:
        self.calls += 1
        sums = self.weights[torch.arange(12), tokens[..., 0]].sum(1)
        return torch.cat([self.bias + sums, sums / 2]) if state.guided else self.bias + sums


def decode(sampler: Any, *samples: int, law: TokenLaw = LAW, **parts: Any) -> Any:
    return sampler(Sums(0, 0.7), None, law=law, generator=seeded(*samples), batch_size=len(samples), **parts)


@pytest.mark.parametrize("num_drafts", [0, 1, 4, 20])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_masked_decoding(name, num_drafts):
    settings = SETTINGS[name]
    plain = decode(MaskedSampler(**settings), *range(4))
    found = decode(FreeDaveSampler(num_drafts=num_drafts, **settings), *range(4))
    assert torch.equal(found.tokens, plain.tokens)
    assert found.trace.beside(plain.trace.law_settings).identical
    steps = (plain.trace.entry_call.flatten(1).amax(1) + 1).tolist()  # after the last that kept a token
    calls = found.trace.target_calls.tolist()
    assert (
        calls == steps
        if num_drafts == 0
        else all(one <= other for one, other in zip(calls, steps, strict=True))
    )
    # A call of a row scores one state, and the drafts it has.
    assert (found.trace.scored_states <= found.trace.target_calls * (num_drafts + 1)).all()


def test_known_tokens_stay_and_samples_are_what_they_are_alone():
    known = torch.full((4, 12), Sums.mask_id)
    known[1:, :7] = torch.arange(7) % 6
    known[3] = torch.arange(12) % 6  # nothing is left to decode
    sampler = FreeDaveSampler(steps=9, schedule=LINEAR)
    found = decode(sampler, *range(4), known_tokens=known)
    assert torch.equal(found.tokens[1:, :7], known[1:, :7]) and torch.equal(found.tokens[3], known[3])
    assert found.trace.target_calls[3] == found.trace.scored_states[3] == 0
    plain = decode(MaskedSampler(steps=9, schedule=LINEAR), *range(4), known_tokens=known)
    assert torch.equal(found.tokens, plain.tokens)
    for number in range(3):
        alone = decode(sampler, number, known_tokens=known[[number]])
        assert torch.equal(alone.tokens[0], found.tokens[number])
        assert alone.trace.target_calls[0] == found.trace.target_calls[number]


def test_an_end_that_is_noticed_late_costs_no_call(monkeypatch):
    """As on a GPU, where progress reaches the host a call late."""
    seen: list[Tensor] = []

    def late(_: Any, progress: Tensor) -> Tensor | None:
        seen.append(progress.clone())
        return seen[-2] if len(seen) > 1 else None

    usual = decode(FreeDaveSampler(), 0, 1)
    monkeypatch.setattr(HostCopy, "__call__", late)
    found = decode(FreeDaveSampler(), 0, 1)
    assert torch.equal(found.tokens, usual.tokens) and len(seen) == usual.trace.target_calls.max() + 2
    assert torch.equal(found.trace.entry_call, usual.trace.entry_call)


def test_a_draft_that_nobody_checks_is_found_out(monkeypatch):
    """The comparison of a state with its draft always says that they are one."""
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    settings = SETTINGS["one token a step"]
    found = decode(FreeDaveSampler(num_drafts=4, **settings), *range(4))
    assert (found.tokens != decode(MaskedSampler(**settings), *range(4)).tokens).any()


# cychomatica/FreeDave, 7 May 2026: `block_decode_with_full_attention_FreeDave`, one block, temperature 0, branches in a
# batch, `draft_steps` of 2 and of 4. Scale and seed of `Sums`: tokens, and the calls of both.
RECORDED = {
    (0.15, 0): ([3, 5, 0, 4, 0, 4, 2, 1, 5, 0, 4, 1], 9, 6),
    (0.15, 1): ([5, 1, 4, 1, 5, 1, 5, 0, 5, 0, 3, 5], 9, 8),
    (0.15, 2): ([2, 4, 3, 4, 4, 1, 4, 5, 4, 4, 4, 0], 7, 5),
    (0.4, 0): ([4, 5, 3, 3, 5, 3, 3, 1, 5, 1, 5, 2], 10, 10),
    (0.4, 1): ([3, 1, 4, 1, 2, 2, 5, 0, 5, 0, 3, 1], 10, 10),
    (0.4, 2): ([2, 0, 3, 4, 4, 1, 5, 3, 3, 4, 4, 0], 9, 7),
}


@pytest.mark.parametrize("case", RECORDED)
def test_tokens_and_calls_are_those_of_the_public_code(case):
    tokens, *calls = RECORDED[case]
    for num_drafts, count in zip((1, 3), calls, strict=True):
        model = Sums(case[1], case[0])
        choice = Choice(score="probability", greedy=True)
        sampler = FreeDaveSampler(12, num_drafts, schedule=LINEAR, choice=choice)
        found = sampler(model, None, law=TokenLaw(), generator=seeded(0))
        assert found.tokens[0].tolist() == tokens
        assert found.trace.target_calls.tolist() == [count] == [model.calls]


def test_models_whose_states_share_no_call_are_refused():
    class Clip(Sums):
        grid = TokenGrid(1, 12, codebooks=2)

    class Timed(Sums):
        set_time = None

    for kind in (Clip, Timed):
        message = f"{kind.__name__} has several codebooks, or is told the time.*use MaskedSampler"
        refuses(ValueError, message, FreeDaveSampler(), kind(0, 1.0), None, law=TokenLaw())
