"""Laws that read the tokens before the slot, and ends that come early: exact laws of whole sequences by enumeration."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from tests.exactness.enumeration import Enumeration, Enumerator, distance
from tests.helpers.sampler_settings import COMBINATIONS
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.history import (
    NoRepeatNgram,
    NotBefore,
    PrefixModel,
    RepetitionPenalty,
    TextFunction,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import State
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

Processor = Callable[[Tensor, Tensor], Tensor]


def model(length: int = 4, **changes) -> TabularModel:
    return TabularModel(TokenGrid(1, length), 3, **changes)


def alternating(ids: Tensor, scores: Tensor) -> Tensor:
    """Some function of the whole text."""
    return scores + (ids.sum(1, keepdim=True) % 3 == torch.arange(3)) * 1.5


def last_of(window: int, inner: Processor) -> Processor:
    return lambda ids, scores: inner(ids[:, max(0, ids.shape[1] - window) :], scores)


def not_before(ids: Tensor, scores: Tensor) -> Tensor:
    return scores if ids.shape[1] >= 2 else scores.masked_fill(torch.arange(3) == 2, -torch.inf)


def theirs(processor: LogitsProcessor) -> Processor:
    return cast(Processor, processor)  # its annotations are classes that no tensor is of


PENALTY = theirs(RepetitionPenaltyLogitsProcessor(1.8))
BIGRAMS = theirs(NoRepeatNGramLogitsProcessor(2))
# Each law with what transformers computes, text by text.
LAWS: dict[str, tuple[TokenLaw, list[Processor]]] = {
    "penalty": (TokenLaw(history=(RepetitionPenalty(1.8),)), [PENALTY]),
    "penalty of a window": (TokenLaw(history=(RepetitionPenalty(1.8, window=2),)), [last_of(2, PENALTY)]),
    "bigrams": (TokenLaw(history=(NoRepeatNgram(2),)), [BIGRAMS]),
    "a function": (TokenLaw(history=(TextFunction(alternating),)), [alternating]),
    "end": (TokenLaw(end=2), []),
    "all": (
        TokenLaw(
            guidance_scale=2.0,
            temperature=1.2,
            history=(RepetitionPenalty(1.5), NoRepeatNgram(2), NotBefore(2, 2)),
            end=2,
        ),
        [theirs(RepetitionPenaltyLogitsProcessor(1.5)), BIGRAMS, not_before],
    ),
}


def law_of_sequences(model: TabularModel, law: TokenLaw, processors: list[Processor]) -> Tensor:
    """The law of every sequence, by one text after the other."""
    length, found = model.grid.num_tokens, torch.zeros(3**model.grid.num_tokens, dtype=torch.float64)

    def follow(ids: list[int], probability: float) -> None:
        if len(ids) == length:
            number = 0
            for token in ids:
                number = 3 * number + token
            found[number] += probability
            return
        context = 0
        for token in ids[-model.order :] if model.order else []:
            context = 3 * context + token
        scores = model.logits[0, len(ids), context]
        if law.guided:
            other = model.logits[model.conditions, len(ids), context]
            scores = other + law.guidance_scale * (scores - other)
        for processor in processors:
            scores = processor(torch.tensor([ids], dtype=torch.long), scores[None].clone())[0]
        share = (scores / law.temperature).softmax(-1)
        if law.end in ids:
            share = torch.eye(3, dtype=torch.float64)[law.end]
        for token in range(3):
            if share[token] > 0:
                follow([*ids, token], probability * float(share[token]))

    follow([], 1.0)
    return found


def run(name: str, sampler, model: TabularModel) -> tuple[Enumeration, float]:
    law, processors = LAWS[name]
    found = Enumerator(sampler, model, law).run()
    return found, distance(found, law_of_sequences(model, law, processors))


# A function is called for one text after the other.
CASES = [
    pytest.param(name, window, marks=[pytest.mark.slow] if (name, window) == ("a function", 3) else [])
    for name in LAWS
    for window in (1, 2, 3)
]


@pytest.mark.every_set
@pytest.mark.fast_sets(16)
@pytest.mark.parametrize("name, window", CASES)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_windows_keep_laws_that_read_the_text(coupling, acceptance, window, name):
    for initial_draft in ("uniform", "last_law") if window > 1 else ("left",):
        sampler = SpeculativeJacobiSampler(window, coupling, acceptance, initial_draft)
        found, apart = run(name, sampler, model(seed=2))
        assert apart < 1e-10
        assert window == 1 or found.calls < 3.6


@pytest.mark.every_set
@pytest.mark.parametrize("name", LAWS)
def test_plain_decoding_has_the_law_too(name):
    found, apart = run(name, AutoregressiveSampler(), model(seed=2))
    assert apart < 1e-10
    # Rows that end need no more calls.
    assert (found.calls < 3.9) == (LAWS[name][0].end is not None)


def committed_only(self: PrefixModel, predicted: Tensor) -> Tensor:
    """The mistake: every position of a window reads the committed text, and not the drafts before it."""
    return predicted[:, :1].expand_as(predicted)


@pytest.mark.fast_sets(6)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("name", ["penalty", "penalty of a window", "bigrams", "a function"])
def test_catches_rules_that_read_the_committed_text_only(monkeypatch, name, coupling, acceptance):
    monkeypatch.setattr(PrefixModel, "stops", committed_only)
    _, apart = run(name, SpeculativeJacobiSampler(3, coupling, acceptance, "last_law"), model(seed=2))
    assert apart > 1e-3


@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
def test_catches_windows_that_commit_tokens_after_an_end(monkeypatch, coupling, acceptance):
    """The end among the drafts is seen neither by the laws after it nor by what is committed."""
    monkeypatch.setattr(PrefixModel, "stops", committed_only)
    monkeypatch.setattr(State, "stop_at_ends", lambda *given: None)
    _, apart = run("end", SpeculativeJacobiSampler(3, coupling, acceptance, "last_law"), model(seed=2))
    assert apart > 1e-3
