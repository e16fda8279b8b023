"""Rules that read the text, and the model that applies them, beside a plain loop over one text at a time."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.history import (
    NoRepeatNgram,
    NotBefore,
    PrefixModel,
    RepetitionPenalty,
    Text,
    TextFunction,
    reading_text,
)
from visual_spec.samplers.core.law import TokenLaw

IDS = [4, 1, 0, 5, 7]  # of the tokens, among 8
NUM_IDS, NEVER = 8, -math.inf


def shifted(ids: Tensor, scores: Tensor) -> Tensor:
    """Some function of the whole text and of all scores, which writes into these."""
    scores += ((ids.sum(1, keepdim=True) + torch.arange(scores.shape[1])) % 3 == 0) * 1.5
    scores[scores == scores.max()] -= 0.25
    return scores


def unchanged(scores: Tensor, text: Text) -> Tensor:
    return scores


def by_hand(
    rule: Any, ids: list[int], real: list[bool], start: int, scores: list[float], tokens: Sequence[int] = IDS
) -> list[float]:
    """The scores of the tokens after the text `ids`, whose places are padding where `real` is false."""
    match rule:
        case RepetitionPenalty(penalty, window):
            first = 0 if window is None else max(0, len(ids) - window)
            seen = {ids[place] for place in range(first, len(ids)) if real[place]}
            changed = [score * penalty if score < 0 else score / penalty for score in scores]
            return [
                new if own in seen else old for own, old, new in zip(tokens, scores, changed, strict=True)
            ]
        case NoRepeatNgram(size):
            grams = {tuple(ids[first : first + size]) for first in range(len(ids) - size + 1)}
            return [
                NEVER if tuple([*ids, own][-size:]) in grams else score
                for own, score in zip(tokens, scores, strict=True)
            ]
        case NotBefore(token, count):
            early = len(ids) - start < count
            return [NEVER if early and own == token else score for own, score in enumerate(scores)]
        case TextFunction():
            whole = torch.full((1, NUM_IDS), NEVER, dtype=torch.float64)
            whole[0, list(tokens)] = torch.tensor(scores, dtype=torch.float64)
            return shifted(torch.tensor([ids]), whole)[0, list(tokens)].tolist()
    return scores


RULES = [
    RepetitionPenalty(1.7),
    RepetitionPenalty(0.6),
    *[RepetitionPenalty(2.0, window) for window in (1, 3, 50)],
    *map(NoRepeatNgram, (1, 2, 3, 5)),
    *[NotBefore(*given) for given in ((1, 0), (3, 2), (0, 4))],
    TextFunction(shifted),
]


@pytest.mark.every_set
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-{RULES.index(rule)}")
def test_rules_are_their_definition(rule):
    """Rows with padding, positions in any order, texts shorter than an n-gram; -inf and 0 among the scores."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        places, start = [3, 9, 12][seed % 3], seed % 4
        ids = torch.tensor([*IDS, 2])[torch.randint(6, (3, places), generator=generator)]
        real = torch.arange(places) >= torch.tensor([[0], [min(start, 2)], [start]])
        stops = torch.randint(places + 1, (3, 4), generator=generator)
        scores = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
        scores[0, :, 1], scores[1, :, 2], scores[2, 1:, 0] = NEVER, 0.0, 0.0
        kept = scores.clone()
        tokens = torch.tensor([[IDS.index(one) if one in IDS else 5 for one in row] for row in ids.tolist()])
        found = rule(scores, Text(ids, real, tokens, stops, torch.tensor(IDS), NUM_IDS, start))
        assert found.dtype == torch.float64 and torch.equal(scores, kept)
        for row in range(3):
            for column, stop in enumerate(stops[row].tolist()):
                given = (
                    ids[row, :stop].tolist(),
                    real[row, :stop].tolist(),
                    start,
                    scores[row, column].tolist(),
                )
                assert found[row, column].tolist() == by_hand(rule, *given), (seed, row, stop)


LENGTH, WINDOW = 6, 3
# By condition. The id of the padding, 1, is also that of a token.
PROMPTS = torch.tensor([[1, 1, 4, 5], [1, 0, 2, 1], [2, 4, 0, 5]])
REAL = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()


class Reader(TabularModel):
    """A table with a prompt, whose tokens have ids of their own in a larger vocabulary."""

    ids_of, num_ids = torch.tensor(IDS), NUM_IDS

    def text_of(self, condition: Tensor) -> tuple[Tensor, Tensor]:
        return PROMPTS[condition], REAL[condition]


LAWS = {
    "guided for a while": TokenLaw(guidance_scale=4.0, guidance_until=2, history=(unchanged,)),
    "guided": TokenLaw(guidance_scale=2.5, history=(RepetitionPenalty(2.0),), end=3),
    "a window": TokenLaw(history=(RepetitionPenalty(1.8, 3), NotBefore(2, 3))),
    "in this order": TokenLaw(history=(TextFunction(shifted), RepetitionPenalty(3.0))),
    "n-grams": TokenLaw(history=(NoRepeatNgram(2), NotBefore(4, 2)), end=4),
    "an end": TokenLaw(guidance_scale=2.0, guidance_until=3, end=0),
}


def scores_by_hand(model: TabularModel, law: TokenLaw, condition: int, tokens: list[int]) -> list[float]:
    """The scores of the slot after `tokens`."""
    slot, prompt, real, of_tokens = len(tokens), [], [], [*range(5)]
    if isinstance(model, Reader):
        prompt, real, of_tokens = PROMPTS[condition].tolist(), REAL[condition].tolist(), IDS
    ids = prompt + [of_tokens[token] for token in tokens]
    if law.end in tokens:
        return [0.0 if token == law.end else NEVER for token in range(5)]
    if slot >= LENGTH:
        return [0.0] * 5  # of the scratch
    context = 0
    for token in tokens[-model.order :]:
        context = 5 * context + token
    scores = model.logits[condition, slot, context].tolist()
    if law.guided and (law.guidance_until is None or slot < law.guidance_until):
        other = model.logits[model.conditions, slot, context].tolist()
        scores = [weak + law.guidance_scale * (own - weak) for own, weak in zip(scores, other, strict=True)]
    for rule in law.history:
        scores = by_hand(rule, ids, real + [True] * slot, len(prompt), scores, of_tokens)
    return scores


def check(found: Tensor, want: Sequence[float], tolerance: float) -> None:
    expected = torch.tensor(want, dtype=torch.float64)
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.every_set
@pytest.mark.parametrize(
    "kind, dtype",
    [(Reader, torch.float64), (Reader, torch.bfloat16), (TabularModel, torch.float64)],
    ids=["text", "text in 16 bits", "no text"],
)
@pytest.mark.parametrize("name", LAWS)
def test_a_window_scores_every_slot_after_the_drafts_before_it(name, kind, dtype):
    """Rows at their own places, slots fed again, scratch after the grid, and rows that leave."""
    law, pick = LAWS[name], random.Random(name)
    model: Any = kind(TokenGrid(1, LENGTH), 5, order=2, conditions=3, dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    conditions, texts = [2, 0, 1, 0], [[] for _ in range(4)]
    prefix = PrefixModel(model, law)
    state = prefix.prefill(torch.tensor(conditions), batch_size=4, guided=False, window=WINDOW)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert not state.guided and state.logits.dtype == want and state.device == torch.device("cpu")
    for row, condition in enumerate(conditions):
        check(state.logits[row], scores_by_hand(model, law, condition, []), tolerance)
    for step in range(24):
        if step in (10, 16):
            kept = [3, 1, 2] if step == 10 else [2, 0]
            logits = state.logits[kept]
            state.select(torch.tensor(kept))
            assert torch.equal(state.logits, logits)
            conditions, texts = [conditions[row] for row in kept], [texts[row] for row in kept]
        fed, slots = [], []
        for row, text in enumerate(texts):
            first = min(pick.randint(max(0, len(text) - 3), len(text)), LENGTH - 1)
            first = 0 if step % 8 == 7 else first
            fed.append([pick.randrange(5) for _ in range(WINDOW)])
            slots.append(list(range(first, first + WINDOW)))
            texts[row] = text[:first] + fed[row]
        scores = prefix(state, torch.tensor(fed), torch.tensor(slots))
        assert scores.dtype == want
        for row, text in enumerate(texts):
            for column, slot in enumerate(slots[row]):
                if slot + 1 < LENGTH or law.history:
                    expected = scores_by_hand(model, law, conditions[row], text[: slot + 1])
                    check(scores[row, column], expected, tolerance)


def test_a_state_hands_on_what_its_sampler_says():
    model = Reader(TokenGrid(1, LENGTH), 5, order=2, conditions=3)
    law = TokenLaw(guidance_scale=2.0, history=(unchanged,), temperature=0.7, top_k=3, top_p=0.9, end=1)
    prefix, rest = reading_text(model, law)
    assert rest == TokenLaw(temperature=0.7, top_k=3, top_p=0.9)
    state = prefix.prefill(torch.tensor([0, 1]), batch_size=2, guided=False, window=WINDOW)
    assert (
        state.inner.guided
        and len(state.inner.logits) == 4
        and state.tokens.shape == (2, PROMPTS.shape[1] + LENGTH + WINDOW)
    )
    widths: list[int] = []
    state.inner.narrow = widths.append
    state.narrow(2)
    state.fixed = True
    prefix(state, torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long))
    assert widths == [2] and state.inner.fixed
