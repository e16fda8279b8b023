"""Columns drafted by a second model: the exact law of whole sequences, from the real step on every outcome."""

from typing import Any

import pytest
import torch

from tests.exactness.enumeration import Enumeration, Enumerator, distance
from tests.helpers.column_laws import LAWS, PATTERNS, PLAIN, model, p_of, with_tries
from tests.helpers.statistics import LEAST_P
from tests.helpers.tabular import TabularColumnModel
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.samplers.core.law import TokenLaw

Networks = tuple[TabularColumnModel, TabularColumnModel]


def pair(pattern: str = "delay", vocab_size: int = 2, **changes) -> Networks:
    """A model, and a drafter that knows it poorly."""
    target = model(pattern, vocab_size, **changes)
    other = model(pattern, vocab_size, **changes | {"seed": 50})
    other.logits = 0.5 * (target.logits + other.logits)
    return target, other


def drafted(num_drafts: int, acceptance: str, tries: int = 1) -> DraftedColumnSampler:
    return with_tries(DraftedColumnSampler(num_drafts, acceptance), tries)


def enumerated(networks: Networks, law: TokenLaw, sampler: DraftedColumnSampler) -> Enumeration:
    return Enumerator(sampler, networks[0], law, drafter=networks[1]).run()


def check(networks: Networks, law: TokenLaw, sampler: DraftedColumnSampler) -> Enumeration:
    found = enumerated(networks, law, sampler)
    assert distance(found, networks[0], law) < 1e-10
    return found


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_lossless(acceptance, num_drafts):
    found = check(pair(), PLAIN, drafted(num_drafts, acceptance, tries=2))
    assert found.calls < 2.9  # of 3 steps
    check(pair("longer delay"), PLAIN, drafted(num_drafts, acceptance))


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_lossless_with_three_tokens_and_other_patterns(acceptance):
    check(pair("delay", 3), PLAIN, drafted(1, acceptance))
    check(pair("delay of two"), PLAIN, drafted(2, acceptance))
    check(pair("parallel"), PLAIN, drafted(1, acceptance))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_lossless_with_every_pattern_and_more_drafts(pattern, acceptance):
    for num_drafts in (1, 2, 3):
        check(pair(pattern), PLAIN, drafted(num_drafts, acceptance))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_lossless_under_guidance_and_filters(law):
    check(pair("delay", 3, seed=1), law, drafted(1, "exact"))
    check(pair("delay", 3, seed=1), law, drafted(1, "identical"))


def test_a_perfect_drafter_is_always_believed():
    target, _ = pair("longer delay")
    for acceptance in ("exact", "identical"):
        # The first column comes with the prefill, three drafts with one call.
        assert check((target, target), PLAIN, drafted(3, acceptance)).calls == pytest.approx(2)


def test_a_draft_is_kept_as_often_as_the_laws_of_the_two_models_overlap():
    """Three steps and one draft: two calls where it is kept, else three. The models differ in one codebook only, so the
    column that replaces a refused one is always found."""
    target, drafter = pair("parallel", 3)
    drafter.logits[..., 1, :] = target.logits[..., 1, :]
    first = target.logits[0, 0, 0].softmax(-1)  # [K, V]
    kept = 0.0
    for a in range(3):
        for b in range(3):
            laws = [network.logits[0, 1, 4 * a + b, 0].softmax(-1) for network in (target, drafter)]
            kept += float(first[0, a] * first[1, b] * torch.minimum(*laws).sum())
    assert 0.5 < kept < 0.95
    found = check((target, drafter), PLAIN, drafted(1, "exact"))
    assert found.calls == pytest.approx(3 - kept, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- mistakes


def off(sampler: DraftedColumnSampler) -> float:
    """TV between what a mistaken sampler returns and the law of the model."""
    networks = pair("longer delay")
    return distance(enumerated(networks, PLAIN, sampler), networks[0])


def plant(monkeypatch, name: str, mistaken: Any) -> None:
    """mistaken(real, sampler, run, state) in the place of a method."""
    real = getattr(DraftedColumnSampler, name)
    monkeypatch.setattr(DraftedColumnSampler, name, lambda *given: mistaken(real, *given))


def test_rows_that_wait_for_a_replacement_have_been_fed_all_of_their_text():
    """The states of real decodes: the call that found no replacement committed nothing, and fed what was new."""
    layers = enumerated(pair("longer delay"), PLAIN, drafted(2, "exact")).layers
    waiting = [(state.fed == state.lengths)[state.pending] for state in (layer.state for layer in layers[1:])]
    caught_up = torch.cat(waiting)
    assert caught_up.any() and not caught_up.all()


def test_catches_a_refusal_that_is_forgotten(monkeypatch):
    """A replacement that was not found is drawn from the target in the next call, as if nothing had been refused."""

    def step(real, self, run, state):
        state.pending = torch.zeros_like(state.pending)
        real(self, run, state)

    plant(monkeypatch, "step", step)
    assert off(drafted(2, "exact")) > 1e-3


def test_catches_a_refused_draft_whose_label_is_dropped(monkeypatch):
    """It is known that it was refused, but not what it was drawn from."""

    def step(real, self, run, state):
        state.refused_law = torch.full_like(state.refused_law, -torch.inf)
        real(self, run, state)

    plant(monkeypatch, "step", step)
    assert off(drafted(2, "exact")) > 1e-3


def test_catches_drafts_labelled_with_the_law_of_another_step(monkeypatch):
    def propose(real, self, run, state):
        found, books = real(self, run, state), run.view.codebooks
        rows = found.label.rows.clone()
        rows[:, books : 2 * books] = rows[:, :books]
        found.label.rows = rows
        return found

    plant(monkeypatch, "propose", propose)
    assert off(drafted(2, "exact")) > 1e-3


# ------------------------------------------------------------------------------------- whole decodes, real noise


class WithDrafter:
    """A sampler that brings its drafter."""

    def __init__(self, sampler: DraftedColumnSampler) -> None:
        self.sampler = sampler
        self.drafter = TabularColumnModel(PATTERNS["longer delay"], 3, seed=9, scale=0.6, dtype=torch.float32)

    def __call__(self, *args, **kwargs):
        return self.sampler(*args, drafter=self.drafter, **kwargs)


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_follows_the_law(keys_in_bulk, acceptance):
    assert p_of(WithDrafter(DraftedColumnSampler(2, acceptance))) > LEAST_P
