"""Loop level, relaxed rules: the divergence meter and the sequence law, by enumeration of the real sampler step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.branching import (
    Branches,
    Enumeration,
    Enumerator,
    _hash,
    _quantise,
    _unique,
    total_variation,
)
from tests.exactness.test_relaxed_rules import one_slot, tv
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.tabular import TabularModel
from visual_spec.samplers import jacobi
from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule
from visual_spec.samplers.core.checks import COUPLINGS, CheckedLaw
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxed import Relaxation
from visual_spec.samplers.jacobi import JacobiOptions, SpeculativeJacobiSampler

CODEBOOK = torch.tensor(
    [[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]
)  # of three tokens; the last one is far from the others
RELAXATIONS = {
    "grouped": Relaxation("grouped", group_size=3, probability_gap=0.3, code_distance=3.0),
    "raised": Relaxation("grouped", 2, probability_gap=0.4, code_distance=None, delta=1.0, bounded=True),
    "clustered": Relaxation("clustered", group_size=2),
    "lantern": Relaxation("lantern", delta=0.3, neighbours=2),
    "lantern++": Relaxation("lantern", factor=2.0, neighbours=2),
    "bounded": Relaxation("lantern", delta=0.05, neighbours=2, factor=4.0, bounded=True),
}
PLAIN = TokenLaw()
# Rules that keep no draft less often than the exact one and replace refused ones from the plain residual.
ONE_SIDED = ("raised", "bounded")


def three_tokens(height: int = 2, width: int = 2, **changes) -> TabularModel:
    return TabularModel(TokenGrid(height, width), 3, **changes)


def rule_of(name: str) -> AcceptanceRule:
    return RELAXATIONS[name].rule(CODEBOOK, "cpu")


class Checked(Enumerator):
    """Adds up the enumerated TV of every slot when it is tested, and checks the laws of all drafts and outcomes."""

    def __init__(self, model: TabularModel, law: TokenLaw, options: JacobiOptions) -> None:
        self.apart = 0.0  # mean over samples of the sum over tested slots
        self.outcomes: list[tuple[Tensor, Tensor]] = []  # what is given, and by how much each outcome is off
        super().__init__(model, law, options, step=self.watched_step)

    def run(self) -> Enumeration:
        found = super().run()
        if self.outcomes:
            given, off = (torch.cat(parts) for parts in zip(*self.outcomes, strict=True))
            first, inverse = _unique(given)
            total = torch.zeros(len(first), 3, dtype=torch.float64).index_add_(0, inverse, off)
            assert total.abs().max() < 1e-10
        return found

    def watched_step(self, model, state, law, noise, options, watch) -> None:
        scored: list[Tensor] = []

        class Observing(CheckedLaw):
            def __call__(self, logits: Tensor, slots: Tensor, guided: bool) -> Tensor:
                scored.append(law(logits, slots, guided))
                return scored[0]

        before, text, draft_law = state.lengths, state.tokens.clone(), state.draft_law
        jacobi.step(model, state, Observing(law.law, law.num_tokens), noise, options, watch)
        if noise.outcomes is None or options.window == 1:
            return
        target, length = scored[0], int(before[0])  # the same in all rows
        committed = state.lengths - before  # the slots before the refused one, and that one
        tested = torch.arange(options.window - 1) < committed[:, None]
        _, laws = one_slot(options.rule, target[:, :-1][tested], draft_law[:, :-1][tested])
        apart = torch.zeros(tested.shape, dtype=torch.float64)
        apart[tested] = tv(laws, target[:, :-1][tested])
        self.apart += float((noise.weight[:, None] * apart).sum())
        # The next slot follows the one-slot law of the rule, given the committed tokens and the draft's label.
        wide = torch.zeros_like(target[:, :-1])
        wide[tested] = laws
        label = _quantise(draft_law[:, 0].exp())
        self._note(torch.cat([text[:, :length], label], 1), noise.weight, state.tokens[:, length], wide[:, 0])
        # The slot behind a window that is kept whole follows the target law, given all before it.
        last = length + options.window - 1
        if last < self.length:
            whole = committed == options.window
            self._note(
                text[whole, :last], noise.weight[whole], state.tokens[whole, last], target[whole, -1].exp()
            )

    def _note(self, given: Tensor, weight: Tensor, token: Tensor, law: Tensor) -> None:
        self.outcomes.append((_hash(given), weight[:, None] * (F.one_hot(token, 3) - law)))

    def _expand(self, branches: Branches | None, call: int) -> Branches:
        if branches is not None:
            check_labels(branches)
        return super()._expand(branches, call)


def check_labels(branches: Branches) -> None:
    """The next slot's draft follows its label, given the committed tokens and that label (DESIGN.md 6, the lemma)."""
    assert branches.draft_law is not None
    length = int(branches.lengths[0])  # of every branch here
    if branches.draft_law.shape[1] == 1:
        return
    label = branches.draft_law[:, 0].exp()
    _, group = _unique(_hash(torch.cat([branches.tokens[:, :length], _quantise(label)], 1)))
    count = int(group.max()) + 1
    drawn = torch.zeros(count, 3, dtype=torch.float64)
    drawn.index_put_((group, branches.tokens[:, length]), branches.weight, accumulate=True)
    labelled = torch.zeros(count, 3, dtype=torch.float64)
    labelled.index_add_(0, group, branches.weight[:, None] * label)
    assert (drawn - labelled).abs().max() < 1e-10


def check(
    name: str, window: int, coupling: str, initial_draft: str, law: TokenLaw = PLAIN, seed: int = 0
) -> None:
    model = three_tokens(seed=seed)
    options = JacobiOptions(window, coupling, "exact", initial_draft, rule_of(name))
    enumerator = Checked(model, law, options)
    found = enumerator.run()
    assert found.law.sum().item() == pytest.approx(1, abs=1e-10)
    assert 0 < found.tested < 3 + 1e-10  # slot 0 has no draft
    # The meter against the enumerated distance of every slot, summed over the slots of a sample.
    assert found.moved == pytest.approx(enumerator.apart, rel=0.05)
    assert found.moved <= enumerator.apart + 1e-12
    if name in ONE_SIDED:
        assert found.moved == pytest.approx(enumerator.apart, abs=1e-12)
        assert found.moved <= RELAXATIONS[name].delta * found.tested + 1e-12
    # And the law of whole samples: as far from the model's as the slots say, at most.
    apart = total_variation(found.law, model.law_of_sequences(law, guided=law.guided))
    assert 0.2 * enumerator.apart < apart <= enumerator.apart + 1e-12
    exact = Enumerator(model, law, replace(options, rule=EXACT)).run()
    if name != "grouped":  # which may withhold more than it gives
        assert found.calls < exact.calls - 1e-3
    assert exact.moved == exact.tested == 0


@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_meter_is_the_enumerated_distance(name, coupling):
    check(name, 2, coupling, "uniform")
    check(name, 3, coupling, "left")


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("initial_draft", ["uniform", "last_law"])
def test_meter_is_the_enumerated_distance_in_a_window_of_three(name, coupling, initial_draft):
    check(name, 3, coupling, initial_draft)
    check(name, 3, coupling, initial_draft, TokenLaw(guidance_scale=1.5, temperature=1.2), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_meter_on_a_longer_sequence(name, coupling):
    options = JacobiOptions(3, coupling, "exact", "left", rule_of(name))
    enumerator = Checked(three_tokens(1, 5, seed=3), PLAIN, options)
    found = enumerator.run()
    assert found.moved == pytest.approx(enumerator.apart, rel=0.05)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_rule_that_relaxes_nothing_moves_nothing(coupling):
    rule = replace(EXACT, lossless=False)
    found = Checked(three_tokens(), PLAIN, JacobiOptions(3, coupling, "exact", "left", rule)).run()
    assert found.moved == 0 and found.tested > 1.5
    assert total_variation(found.law, three_tokens().law_of_sequences(PLAIN)) < 1e-10


@pytest.mark.parametrize("name, coupling", list(zip(RELAXATIONS, 2 * COUPLINGS, strict=True)))
def test_trace_reports_what_the_enumeration_says(name, coupling):
    settings = vars(RELAXATIONS[name])
    sampler = SpeculativeJacobiSampler(window=3, coupling=coupling, initial_draft="left", **settings)
    result = sampler(
        three_tokens(),
        None,
        law=PLAIN,
        generator=torch.Generator().manual_seed(0),
        batch_size=20_000,
        codebook=CODEBOOK,
    )
    expected = Enumerator(
        three_tokens(), PLAIN, JacobiOptions(3, coupling, "exact", "left", rule_of(name))
    ).run()
    trace = result.trace
    assert trace.divergence == pytest.approx(expected.moved / expected.tested, rel=0.05)
    assert trace.moved_mass is not None and trace.moved_mass.shape == (20_000,)
    assert trace.moved_mass.mean().item() == pytest.approx(expected.moved, rel=0.05)
    assert trace.target_calls.double().mean().item() == pytest.approx(expected.calls, rel=0.01)
    index = result.tokens @ 3 ** torch.arange(3, -1, -1)
    measured = torch.bincount(index, minlength=81) / len(index)
    assert (
        total_variation(measured, expected.law) < 0.03
    )  # 0.026 is what 20,000 samples give of 81 cells alike
