"""Several codebooks: the residual of a product, and the exact law of whole sequences, from the real code."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.branching import BranchingNoise
from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator, distance
from tests.exactness.planted import observing, relabel, target_for_residual
from tests.exactness.regions import Regions, total_variation
from tests.helpers.column_laws import LAWS, PATTERNS, model, one_by_one, p_of, with_tries
from tests.helpers.relaxed_rules import one_slot, settings_of, tv
from tests.helpers.statistics import LEAST_P
from tests.helpers.tabular import TabularColumnModel
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.samplers.core import verification
from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule, Relaxation, residual
from visual_spec.samplers.core.checks import COUPLINGS
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import PROPOSAL, RESIDUAL
from visual_spec.samplers.core.relaxed import rule_of
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster import column_base
from visual_spec.samplers.raster.column_base import UNITS, ColumnView
from visual_spec.samplers.raster.column_residual import draw_product_residual, product_acceptance
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import (
    COLUMN_DRAFTS,
    ColumnJacobiSampler,
    ColumnJacobiState,
    join_rules,
)

EXACT_ROWS = [(coupling, "exact", unit) for coupling in COUPLINGS for unit in UNITS]
ROWS = [("gumbel", "identical", "column"), *EXACT_ROWS]


# ------------------------------------------------------------------------------------- the residual of a product


def products(codebooks: int, vocab_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Target and draft laws [K, V]: near and far, with forbidden tokens, with equal codebooks, points, no draft."""
    generator = torch.Generator().manual_seed(10 * codebooks + vocab_size)

    def random() -> Tensor:
        return torch.randn(codebooks, vocab_size, generator=generator, dtype=torch.float64)

    for scale, apart in itertools.product((0.3, 2.0), (1e-3, 0.3, 3.0)):
        near = scale * random()
        yield near.log_softmax(-1), (near + apart * random()).log_softmax(-1)
    base = 2 * random()
    target, draft = base.clone(), base + random()
    target[:, 0] = -torch.inf
    draft[0, 1] = -torch.inf
    yield target.log_softmax(-1), draft.log_softmax(-1)
    yield target.log_softmax(-1), base.log_softmax(-1)
    # Near laws, of which a try may hold a token that the target forbids, and one that only the target has.
    mass = target.log_softmax(-1).exp()
    mass[0] = 0.85 * mass[0]
    mass[0, 0] = 0.15
    if vocab_size > 2:
        mass[-1, -1] = 0
    yield target.log_softmax(-1), mass.log().log_softmax(-1)
    draft[:-1] = target[:-1]
    yield target.log_softmax(-1), draft.log_softmax(-1)  # only the last codebook differs
    point = torch.full_like(base, -torch.inf).index_fill(1, torch.tensor([vocab_size - 1]), 0.0)
    yield base.log_softmax(-1), point
    yield point, base.log_softmax(-1)
    yield base.log_softmax(-1), torch.full_like(base, -torch.inf)


def table(law: Tensor) -> Tensor:
    """The product of laws [K, V] as one law of V ** K columns."""
    whole = law.new_ones(1)
    for codebook in law.exp():
        whole = (whole[:, None] * codebook).flatten()
    return whole


def one_draw(target: Tensor, draft: Tensor, tries: int) -> tuple[Tensor, float]:
    """The mass of each column that is found, and the mass of finding none, over all outcomes of all draws."""
    codebooks, vocab_size = target.shape
    powers = vocab_size ** torch.arange(codebooks - 1, -1, -1)
    law = torch.zeros(vocab_size**codebooks, dtype=torch.float64)
    missed = 0.0
    waiting: list[tuple[int, dict[int, Tensor]]] = [(1, {})]
    while waiting:
        rows, given = waiting.pop()
        entries, weight = torch.arange(codebooks).expand(rows, -1), torch.ones(rows, dtype=torch.float64)
        noise = BranchingNoise(weight, torch.zeros_like(entries), Regions(), 3, 1, given, tries)
        wide = target.expand(rows, -1, -1), draft.expand(rows, -1, -1)
        tokens, found = draw_product_residual(*wide, noise, entries, 3, tries=tries)
        if noise.pending is None:
            law.index_add_(0, (tokens @ powers)[found], noise.weight[found])
            missed += float(noise.weight[~found].sum())
            continue
        row, outcome = (noise.weight[:, None] * noise.pending > 0).nonzero(as_tuple=True)
        given = {number: earlier[row] for number, earlier in given.items()}
        waiting.append((len(row), given | {noise.number: outcome}))
    return law, missed


@pytest.mark.parametrize("codebooks, vocab_size, tries", [(1, 3, 1), (2, 2, 2), (2, 3, 1), (3, 2, 1)])
def test_what_is_found_follows_the_residual_of_the_product(codebooks, vocab_size, tries):
    for target, draft in products(codebooks, vocab_size):
        law, missed = one_draw(target, draft, tries)
        excess = (table(target) - table(draft)).clamp(min=0)
        assert (law / law.sum() - excess / excess.sum()).abs().max() < 1e-12
        assert law.sum().item() + missed == pytest.approx(1, abs=1e-12)
        # A try is in vain with probability 1 - 1 / K at most, and tries are independent.
        assert missed <= (1 - 1 / codebooks) ** tries + 1e-12
        assert missed == pytest.approx(one_draw(target, draft, 1)[1] ** tries, abs=1e-12)


@pytest.mark.parametrize("codebooks, vocab_size", [(2, 3), (3, 2)])
def test_column_test_keeps_as_often_as_any_can_and_residual_restores_the_target(codebooks, vocab_size):
    every = torch.tensor(list(itertools.product(range(vocab_size), repeat=codebooks)))  # [V ** K, K]
    for target, draft in products(codebooks, vocab_size):
        if draft.isneginf().all():
            continue  # no draft, no test
        mass, size = table(draft), (1, len(every), -1, -1)
        keep = torch.where(
            mass > 0, product_acceptance(target.expand(*size), draft.expand(*size), every[None])[0], 0
        )
        apart = total_variation(table(target), mass)
        assert (mass * keep).sum().item() == pytest.approx(1 - apart, abs=1e-12)
        one_by_one = torch.stack(
            [table(target[None, k]).minimum(table(draft[None, k])).sum() for k in range(codebooks)]
        )
        assert (mass * keep).sum() >= one_by_one.prod() - 1e-12
        excess = (table(target) - mass).clamp(min=0)
        committed = mass * keep + (mass * (1 - keep)).sum() * excess / excess.sum()
        assert (committed - table(target)).abs().max() < 1e-12


def test_equal_laws_have_a_residual_too():
    """Rounding may refuse a draft of equal laws; something must replace it."""
    law = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found, missed = one_draw(law, law, 1)
    assert missed == 0 and (found - table(law.double())).abs().max() < 1e-6


# ------------------------------------------------------------------------------------------------ whole sequences


def check(
    model: TabularColumnModel, law: TokenLaw, sampler: ColumnJacobiSampler, **parts: Any
) -> Enumeration:
    found = Enumerator(sampler, model, law, **parts).run()
    assert distance(found, model, law) < 1e-10
    return found


def jacobi(window: int, coupling: str, acceptance: str, unit: str, draft: str = "uniform", tries: int = 1):
    return with_tries(ColumnJacobiSampler(window, coupling, acceptance, unit, draft), tries)


@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_every_combination_is_lossless(coupling, acceptance, unit):
    for initial_draft in COLUMN_DRAFTS:
        found = check(model("delay"), PLAIN, jacobi(2, coupling, acceptance, unit, initial_draft))
        if unit == "codebook":  # with a single try, a column may have to wait for its replacement
            assert found.calls < 2.98
    check(model("parallel"), PLAIN, jacobi(2, coupling, acceptance, unit, "left"))


@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_window_of_one_is_autoregressive(coupling, acceptance, unit):
    found = check(model("delay"), PLAIN, jacobi(1, coupling, acceptance, unit))
    assert found.calls == pytest.approx(3)


@pytest.mark.parametrize("coupling, acceptance, unit", [ROWS[0], EXACT_ROWS[-2], EXACT_ROWS[1]])
def test_lossless_in_a_window_of_three(coupling, acceptance, unit):
    check(model(), PLAIN, jacobi(3, coupling, acceptance, unit, "left"))


@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_lossless_with_three_tokens(coupling, acceptance, unit):
    check(model("delay", 3), PLAIN, jacobi(2, coupling, acceptance, unit, "last_law"))


def test_lossless_where_a_codebook_starts_when_another_has_ended():
    check(model("delay of two"), PLAIN, jacobi(3, "gumbel", "exact", "column", "left"))
    check(model("delay of two"), PLAIN, jacobi(3, "maximal", "exact", "codebook", "last_law"))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_lossless_whatever_the_number_of_tries(coupling):
    calls = [
        check(model("delay"), PLAIN, jacobi(2, coupling, "exact", "column", "last_law", tries)).calls
        for tries in (1, 2)
    ]
    assert calls[1] < calls[0] - 0.01  # what more tries are for: a replacement is seldom put off


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_lossless_under_guidance_and_filters(law):
    check(model("delay", 3, seed=1), law, jacobi(2, "maximal", "exact", "column", "left"))
    check(model("delay", 3, seed=1), law, jacobi(2, "gumbel", "identical", "column", "last_law"))


def test_a_column_that_waits_may_hold_what_no_law_allows():
    """The last try at a replacement, in vain; it is not tested, and its ratio would be no number."""
    check(model("delay", 3, seed=1), LAWS["top-k"], jacobi(3, "maximal", "exact", "column", "last_law"))


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_lossless_under_guidance_and_filters_in_a_window_of_three(law, coupling, acceptance, unit):
    check(model("delay", 3, seed=1), law, jacobi(3, coupling, acceptance, unit, "last_law"))


@pytest.mark.slow
@pytest.mark.parametrize("initial_draft", COLUMN_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_lossless_with_every_pattern(pattern, coupling, acceptance, unit, initial_draft):
    for window in (2, 3):
        if (pattern, initial_draft, window) == ("three codebooks", "uniform", 3):
            continue  # minutes
        check(model(pattern, seed=3), PLAIN, jacobi(window, coupling, acceptance, unit, initial_draft))


@pytest.mark.slow
@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_lossless_on_a_longer_sequence(coupling, acceptance, unit):
    """S = 5 is the shortest at which the coupling of a draft that was refused once changes what comes after."""
    valid = CodebookPattern.delay([0, 1]).valid(4).T
    check(TabularColumnModel(valid, 2, order=2), PLAIN, jacobi(3, coupling, acceptance, unit, "left"))


# ------------------------------------------------------------------------------------------------------- mistakes


def off(sampler: ColumnJacobiSampler, pattern: str = "delay", **changes) -> float:
    """TV between what a mistaken sampler returns and the law of the model."""
    return distance(Enumerator(sampler, model(pattern, **changes)).run(), model(pattern, **changes))


def plant(monkeypatch, mistaken: Any) -> None:
    """mistaken(real, sampler, run, state) in the place of the step."""
    real = ColumnJacobiSampler.step
    monkeypatch.setattr(ColumnJacobiSampler, "step", lambda *given: mistaken(real, *given))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_catches_codebooks_tested_one_by_one_with_the_residual_of_the_column(monkeypatch, coupling):
    monkeypatch.setattr(column_base, "product_acceptance", one_by_one)
    assert off(jacobi(2, coupling, "exact", "column")) > 3e-3


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_catches_a_column_replaced_from_the_residuals_of_its_codebooks(monkeypatch, coupling):
    """Their product is not the residual of the product."""

    def draw(target, draft_law, noise, entries, round, *, tries):
        return noise.categorical(residual(target, draft_law), entries, RESIDUAL, round), target[:, 0, 0] < 1

    monkeypatch.setattr(column_base, "draw_product_residual", draw)
    assert off(jacobi(2, coupling if coupling != "maximal" else "gumbel", "exact", "column")) > 3e-3


@pytest.mark.parametrize("coupling, acceptance, unit", EXACT_ROWS)
def test_catches_a_residual_replaced_by_the_target(monkeypatch, coupling, acceptance, unit):
    def draw(target, draft_law, noise, entries, round, *, tries):
        return noise.categorical(target, entries, PROPOSAL, round * tries), target[:, 0, 0] < 1

    monkeypatch.setattr(column_base, "draw_product_residual", draw)
    for module in (column_base, verification):
        monkeypatch.setattr(module, "residual", target_for_residual)
    assert off(jacobi(2, coupling, acceptance, unit)) > 1e-2


def test_catches_a_cover_that_is_taken_for_the_residual(monkeypatch):
    """Every try is kept."""

    def keen_step(real_step, self, run, state):
        real = run.noise.bernoulli

        def bernoulli(probability, slots, stream, round=0):
            return real(
                torch.ones_like(probability) if stream == PROPOSAL else probability, slots, stream, round
            )

        run.noise.bernoulli = bernoulli
        real_step(self, run, state)

    plant(monkeypatch, keen_step)
    assert off(jacobi(2, "independent", "exact", "column")) > 1e-3


def test_catches_a_forbidden_column_that_is_kept(monkeypatch):
    """Where one codebook holds a token that the target forbids, and another one that it was not drafted from, the
    ratio is no number; and then the try is to be refused."""
    real = Tensor.nan_to_num
    monkeypatch.setattr(Tensor, "nan_to_num", lambda values, nan: real(values, nan=1.0))
    worst = 0.0
    for target, draft in products(2, 3):
        law, _ = one_draw(target, draft, 1)
        excess = (table(target) - table(draft)).clamp(min=0)
        worst = max(worst, float((law / law.sum() - excess / excess.sum()).abs().max()))
    assert worst > 1e-3


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_catches_a_refusal_that_is_forgotten(monkeypatch, coupling):
    """The refused draft's step is drafted and tested as if nothing had happened."""

    def forgetful_step(real_step, self, run, state):
        real_step(self, run, state)
        state.pending = torch.zeros_like(state.pending)

    plant(monkeypatch, forgetful_step)
    assert off(jacobi(2, coupling, "exact", "column")) > 1e-2


def labels(state: ColumnJacobiState, count: int) -> Tensor:
    """The laws of the drafts of the window, by entry: [B, (W - 1) * K, V]."""
    assert state.label is not None
    return state.label.dense(rows_of(state.tokens, state.next_slots(count)).flatten(1))


@pytest.mark.parametrize("unit", UNITS)
def test_catches_an_old_label_on_a_kept_draft(monkeypatch, unit):
    """Under maximal coupling, a draft that was kept after the refusal keeps its old label as well."""

    def stale_step(real_step, self, run, state):
        drafts = self.config.window - 1
        old_law, old_lengths, old_tokens = labels(state, drafts), state.lengths, state.tokens.clone()
        real_step(self, run, state)
        steps = state.next_slots(drafts)
        before = steps - old_lengths[:, None]  # their columns in the last window
        same = rows_of(state.tokens, steps) == rows_of(old_tokens, steps)  # [B, W - 1, K]
        kept = (same & (before < drafts)[..., None]).flatten(1)[..., None]
        old = rows_of(old_law.unflatten(1, (drafts, -1)).flatten(2), before.clamp(max=drafts - 1))
        new = labels(state, drafts)
        relabel(state, torch.where(kept, old.view_as(new), new))

    plant(monkeypatch, stale_step)
    assert off(jacobi(3, "maximal", "exact", unit), "delay") > 1e-3


@pytest.mark.parametrize("coupling, acceptance, unit", [ROWS[0], EXACT_ROWS[0]])
def test_catches_entries_that_share_their_noise(monkeypatch, coupling, acceptance, unit):
    """Codebook k at step s and codebook 0 at step s + k are no longer independent."""

    def shared(self, steps):
        return (steps[..., None] + torch.arange(self.codebooks)).flatten(1)

    monkeypatch.setattr(ColumnView, "entries", shared)
    assert off(jacobi(2, coupling, acceptance, unit, "last_law"), "parallel") > 1e-3


# ------------------------------------------------------------------------------------------------- relaxed rules

# Codes of three tokens in two codebooks: near each other are 0 and 1 in the first, 1 and 2 in the second.
CODES = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], [[-1.0, 0.0], [1.0, 0.0], [0.6, 0.8]]])
RELAXATIONS = {
    "grouped": Relaxation("grouped", group_size=3, probability_gap=0.3, code_distance=3.0),
    "clustered": Relaxation("clustered", group_size=2),
    "lantern": Relaxation("lantern", delta=0.3, neighbours=2),
    "bounded": Relaxation("lantern", delta=0.05, neighbours=2, factor=4.0, bounded=True),
}


def rules_of(name: str) -> list[AcceptanceRule]:
    return [rule_of(RELAXATIONS[name], codes, "cpu") for codes in CODES]


class Measured(Enumerator):
    """Adds up the enumerated TV of every token when it is tested."""

    def __init__(
        self, sampler: ColumnJacobiSampler, model: TabularColumnModel, rules: list[AcceptanceRule]
    ) -> None:
        super().__init__(sampler, model, rule=join_rules(rules), codebook=CODES)
        self.rules = rules
        self.tallies.update(apart=[], counted=[])

    def step(self, run: Run, state: ColumnJacobiState) -> None:
        seen: list[Tensor] = []
        self.before = labels(state, self.sampler.config.window - 1), state.lengths
        super().step(replace(run, law=observing(run.law, seen)), state)
        self.target = seen[0]

    def count(self, origin: Tensor, state: ColumnJacobiState, weight: Tensor) -> None:
        super().count(origin, state, weight)
        label, lengths = self.before
        place = torch.arange(self.sampler.config.window - 1)
        committed = state.lengths - lengths
        valid = self.first.view.valid[lengths[:, None] + place]
        tested = ((place < committed[:, None])[..., None] & valid).flatten(1)  # [N, (W - 1) * K]
        apart = torch.zeros(tested.shape, dtype=torch.float64)
        target = self.target[:, : tested.shape[1]]
        for k, rule in enumerate(self.rules):
            at = tested & (torch.arange(tested.shape[1]) % len(self.rules) == k)
            _, laws = one_slot(rule, target[at], label[at])
            apart[at] = tv(laws, target[at])
        self.tallies["apart"].append((origin, weight * apart.sum(1)))
        self.tallies["counted"].append((origin, weight * tested.sum(1)))


CASES = [
    ("grouped", "gumbel", "delay", 2, "uniform"),
    ("clustered", "maximal", "delay", 2, "uniform"),
    ("lantern", "independent", "delay", 2, "uniform"),
    ("bounded", "maximal", "delay", 2, "left"),
    *(
        pytest.param(name, coupling, *setting, marks=pytest.mark.slow)
        for name in RELAXATIONS
        for coupling in COUPLINGS
        for setting in [("delay", 2, "uniform"), ("delay", 3, "left"), ("longer delay", 2, "left")]
    ),
]


@pytest.mark.parametrize("name, coupling, pattern, window, initial_draft", CASES)
def test_meter_is_the_enumerated_distance(name, coupling, pattern, window, initial_draft):
    three = model(pattern, 3, seed=2)
    settings = settings_of(RELAXATIONS[name])
    sampler = ColumnJacobiSampler(window, coupling, unit="codebook", initial_draft=initial_draft, **settings)
    enumerator = Measured(sampler, three, rules_of(name))
    found = enumerator.run()
    apart = enumerator.total("apart")
    assert found.moved == pytest.approx(apart, rel=0.05) and found.moved > 0.01
    assert found.moved <= apart + 1e-12
    assert found.tested == pytest.approx(enumerator.total("counted"), abs=1e-10)
    if name == "bounded":
        assert found.moved == pytest.approx(apart, abs=1e-12)
        assert found.moved <= RELAXATIONS[name].delta * found.tested + 1e-12
    # The law of whole samples is as far from the model's as the tokens say, at most.
    assert 0.1 * apart < distance(found, three) <= apart + 1e-12
    exact = Enumerator(jacobi(window, coupling, "exact", "codebook", initial_draft), three).run()
    assert exact.moved == exact.tested == 0
    if name != "grouped":  # which may withhold more than it gives
        assert found.calls < exact.calls - 1e-3


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_rule_that_relaxes_nothing_moves_nothing(coupling):
    rules = 2 * [replace(EXACT, lossless=False)]
    found = Measured(jacobi(3, coupling, "exact", "codebook", "left"), model(), rules).run()
    assert found.moved == 0 and found.tested > 1.5
    assert total_variation(found.law, model().law_of_sequences(PLAIN)) < 1e-10


# ------------------------------------------------------------------------------------- whole decodes, real noise


def test_autoregressive_sampling_follows_the_law(keys_in_bulk):
    assert p_of(ColumnAutoregressiveSampler()) > LEAST_P


@pytest.mark.parametrize("coupling, acceptance, unit", [EXACT_ROWS[0], EXACT_ROWS[-1]])
def test_follows_the_law(keys_in_bulk, coupling, acceptance, unit):
    assert p_of(ColumnJacobiSampler(3, coupling, acceptance, unit)) > LEAST_P


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_follows_the_law_with_every_seed(keys_in_bulk, coupling, acceptance, unit, seed):
    assert p_of(ColumnJacobiSampler(3, coupling, acceptance, unit), seed) > LEAST_P


@pytest.mark.parametrize("coupling", ["independent"])
def test_statistics_fail_on_codebooks_tested_one_by_one(keys_in_bulk, monkeypatch, coupling):
    monkeypatch.setattr(column_base, "product_acceptance", one_by_one)
    assert p_of(ColumnJacobiSampler(3, coupling, "exact", "column")) < LEAST_P


def test_entries_have_counter_slots_of_their_own():
    entries = ColumnView(model("three codebooks"), 5)
    assert torch.equal(entries.entries(torch.arange(9)[None]), torch.arange(27)[None])
