"""Columns drafted by a second model: the exact law of whole sequences, from the real step on every outcome."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.exactness.branching import Enumeration, total_variation
from tests.exactness.column_branching import ColumnBranches, ColumnEnumerator, ColumnNoise
from tests.exactness.test_column_law import LAWS, PATTERNS, PLAIN, model, one_by_one, p_of
from tests.exactness.test_statistics import LEAST_P
from visual_spec.models.core.tabular import TabularColumnModel
from visual_spec.samplers import columns_drafted, columns_jacobi
from visual_spec.samplers.columns_drafted import DraftedColumnSampler, DraftedColumnState
from visual_spec.samplers.columns_jacobi import ColumnOptions
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import Stopwatch


class DraftedColumnEnumerator(ColumnEnumerator):
    """Enumerates `DraftedColumnSampler` on two tabular models. States are committed text, and a draft to replace.

    Both caches are rebuilt for every step, with an absurd token wherever the text has not been fed: reading it would
    show.
    """

    def __init__(
        self,
        model: TabularColumnModel,
        drafter: TabularColumnModel,
        law: TokenLaw,
        options: ColumnOptions,
        step: Callable[..., None] = columns_drafted.step,
    ) -> None:
        super().__init__(model, law, options, step)
        self.drafter = drafter

    def _call(self, branches: ColumnBranches, noise: ColumnNoise, call: int) -> DraftedColumnState:
        rows, window = len(branches.weight), self.options.window
        caches = [
            network.prefill(None, batch_size=rows, guided=self.guided, window=window)
            for network in (self.model, self.drafter)
        ]
        if call == 0:
            return columns_drafted.prepare(self.entries, caches[0], caches[1], self.law, noise, self.options)
        absurd = self.model.vocab_size - 1
        every = torch.arange(branches.tokens.shape[1])

        def text(until: Tensor) -> Tensor:
            return branches.tokens.masked_fill((every >= until[:, None])[..., None], absurd)

        # The drafter has missed all that one call can have committed; of the model's text only the newest column.
        fed = (branches.lengths - window).clamp(min=0)
        caches[0].tokens = self.entries.with_special(text(branches.lengths - 1), every)
        caches[1].tokens = self.entries.with_special(text(fed), every)
        state = DraftedColumnState(
            cache=caches[0],
            tokens=text(branches.lengths),
            lengths=branches.lengths,
            draft_law=None if branches.draft_law is None else branches.draft_law.clone(),
            pending=branches.pending,
            round=call - 1,
            target_calls=torch.zeros(rows, dtype=torch.long),
            commit_call=torch.zeros(branches.tokens.shape[:2], dtype=torch.long),
            drafter_cache=caches[1],
            fed=fed,
        )
        self.step(self.model, self.drafter, self.entries, state, self.law, noise, self.options, Stopwatch())
        return state

    def _merge(self, branches: ColumnBranches) -> ColumnBranches:
        """Of what was drafted only the label of a draft to replace is left, and of the noise nothing."""
        steps = torch.arange(branches.tokens.shape[1])
        branches.tokens = branches.tokens.masked_fill((steps >= branches.lengths[:, None])[..., None], 0)
        branches.regions = torch.zeros_like(branches.regions)
        if branches.draft_law is not None:
            law = torch.full_like(branches.draft_law, -torch.inf)
            law[:, 0] = torch.where(branches.pending[:, None, None], branches.draft_law[:, 0], law[:, 0])
            branches.draft_law = law
        return super()._merge(branches)


def pair(
    pattern: str = "delay", vocab_size: int = 2, **changes
) -> tuple[TabularColumnModel, TabularColumnModel]:
    """A model, and a drafter that knows it poorly."""
    target = model(pattern, vocab_size, **changes)
    other = model(pattern, vocab_size, **changes | {"seed": 50})
    other.logits = 0.5 * (target.logits + other.logits)
    return target, other


def options(num_drafts: int, acceptance: str, tries: int = 1) -> ColumnOptions:
    return ColumnOptions(num_drafts + 1, "gumbel", acceptance, "column", "left", tries=tries)


def check(
    models: tuple[TabularColumnModel, TabularColumnModel], law: TokenLaw, chosen: ColumnOptions
) -> Enumeration:
    found = DraftedColumnEnumerator(*models, law, chosen).run()
    expected = models[0].law_of_sequences(law, guided=law.guided)
    assert found.law.sum().item() == pytest.approx(1, abs=1e-10)
    assert total_variation(found.law, expected) < 1e-10
    return found


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_lossless(acceptance, num_drafts):
    found = check(pair(), PLAIN, options(num_drafts, acceptance, tries=2))
    assert found.calls < 2.9  # of 3 steps
    check(pair("longer delay"), PLAIN, options(num_drafts, acceptance))


@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_lossless_with_three_tokens_and_other_patterns(acceptance):
    check(pair("delay", 3), PLAIN, options(1, acceptance))
    check(pair("delay of two"), PLAIN, options(2, acceptance))
    check(pair("parallel"), PLAIN, options(1, acceptance))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("acceptance", ["exact", "identical"])
def test_lossless_with_every_pattern_and_more_drafts(pattern, acceptance):
    for num_drafts in (1, 2, 3):
        check(pair(pattern), PLAIN, options(num_drafts, acceptance))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_lossless_under_guidance_and_filters(law):
    check(pair("delay", 3, seed=1), law, options(1, "exact"))
    check(pair("delay", 3, seed=1), law, options(1, "identical"))


def test_a_perfect_drafter_is_always_believed():
    target, _ = pair("longer delay")
    for acceptance in ("exact", "identical"):
        found = check((target, target), PLAIN, options(3, acceptance))
        assert found.calls == pytest.approx(
            2
        )  # the first column comes with the prefill, three drafts with one call


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
    found = check((target, drafter), PLAIN, options(1, "exact"))
    assert found.calls == pytest.approx(3 - kept, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- mistakes


def off(chosen: ColumnOptions, step: Callable[..., None] = columns_drafted.step) -> float:
    """TV between what a mistaken sampler returns and the law of the model."""
    models = pair("longer delay")
    found = DraftedColumnEnumerator(*models, PLAIN, chosen, step).run()
    assert found.law.sum().item() == pytest.approx(1, abs=1e-10)
    return total_variation(found.law, models[0].law_of_sequences(PLAIN))


def test_catches_codebooks_tested_one_by_one_with_the_residual_of_the_column(monkeypatch):
    monkeypatch.setattr(columns_jacobi, "product_acceptance", one_by_one)
    assert off(options(2, "exact")) > 1e-3


def test_catches_a_refused_draft_whose_law_is_forgotten(monkeypatch):
    """A replacement that was not found is drawn from the target in the next call, as if nothing had been refused."""

    def step(model, drafter, entries, state, law, noise, chosen, watch) -> None:
        state.pending = torch.zeros_like(state.pending)
        columns_drafted.step(model, drafter, entries, state, law, noise, chosen, watch)

    assert off(options(2, "exact"), step) > 1e-3


def test_catches_drafts_labelled_with_the_law_of_another_step(monkeypatch):
    true_propose = columns_drafted.propose

    def propose(drafter, entries, state, *args) -> Tensor:
        drafts = true_propose(drafter, entries, state, *args)
        state.draft_law[:, 1] = state.draft_law[:, 0]
        return drafts

    monkeypatch.setattr(columns_drafted, "propose", propose)
    assert off(options(2, "exact")) > 1e-3


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


def test_statistics_fail_on_codebooks_tested_one_by_one(keys_in_bulk, monkeypatch):
    monkeypatch.setattr(columns_jacobi, "product_acceptance", one_by_one)
    assert p_of(WithDrafter(DraftedColumnSampler(2))) < LEAST_P
