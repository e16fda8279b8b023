"""Loop level, relaxed rules: the divergence meter and the sequence law, by enumeration of the real sampler step."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator, distance
from tests.exactness.planted import labels, observing
from tests.exactness.regions import distinct, hash_rows, quantised
from tests.helpers.drafting_sequences import three_tokens
from tests.helpers.relaxed_rules import (
    CODEBOOK,
    ONE_SIDED,
    RELAXATIONS,
    check_reports,
    one_slot,
    settings_of,
    tv,
)
from tests.helpers.tabular import TabularModel
from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule
from visual_spec.samplers.core.checks import COUPLINGS
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run
from visual_spec.samplers.raster.jacobi import JacobiState, SpeculativeJacobiSampler


def sampler_of(name: str, window: int, coupling: str, initial_draft: str) -> SpeculativeJacobiSampler:
    return SpeculativeJacobiSampler(
        window, coupling, initial_draft=initial_draft, **settings_of(RELAXATIONS[name])
    )


class Checked(Enumerator):
    """Adds up the enumerated TV of every slot when it is tested, and checks the laws of all drafts and outcomes."""

    def __init__(
        self,
        sampler: SpeculativeJacobiSampler,
        model: TabularModel,
        law: TokenLaw = PLAIN,
        rule: AcceptanceRule | None = None,
    ) -> None:
        super().__init__(sampler, model, law, rule=rule, codebook=CODEBOOK)
        self.tallies["apart"] = []  # mean over samples of the sum over tested slots
        # By state: what is given, and by how much each outcome is off.
        self.outcomes: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def apart(self) -> float:
        return self.total("apart")

    def run(self) -> Enumeration:
        found = super().run()
        origin, given, off = (torch.cat(parts) for parts in zip(*self.outcomes, strict=True))
        first, inverse = distinct(given)
        off = found.visits[origin, None] * off
        total = torch.zeros(len(first), 3, dtype=torch.float64).index_add_(0, inverse, off)
        assert total.abs().max() < 1e-10
        check_labels(found, self.first.num_tokens)
        return found

    def step(self, run: Run, state: JacobiState) -> None:
        scored: list[Tensor] = []
        self.before = state.lengths, state.tokens.clone(), labels(state)
        super().step(replace(run, law=observing(run.law, scored)), state)
        self.target = scored[0]

    def count(self, origin: Tensor, state: JacobiState, weight: Tensor) -> None:
        super().count(origin, state, weight)
        target, (lengths, text, label) = self.target, self.before
        drafts, length = label.shape[1], self.first.num_tokens
        committed = state.lengths - lengths  # the slots before the refused one, and that one
        tested = torch.arange(drafts) < committed[:, None]
        _, laws = one_slot(self.first.rule, target[:, :-1][tested], label[tested])
        apart = torch.zeros(tested.shape, dtype=torch.float64)
        apart[tested] = tv(laws, target[:, :-1][tested])
        self.tallies["apart"].append((origin, weight * apart.sum(1)))
        # The next slot follows the one-slot law of the rule, given the committed tokens and the draft's label.
        wide = torch.zeros_like(target[:, :-1])
        wide[tested] = laws
        given = [text_before(text, lengths), quantised(label[:, 0].exp())]
        self._note(origin, given, weight, state.tokens, lengths, wide[:, 0])
        # The slot after a window that is kept whole follows the target law, given all before it.
        whole = (committed == drafts + 1) & (lengths + drafts < length)
        last = (lengths + drafts)[whole]
        given = [text_before(text[whole], last)]
        self._note(origin[whole], given, weight[whole], state.tokens[whole], last, target[whole, -1].exp())

    def _note(
        self, origin: Tensor, given: list[Tensor], weight: Tensor, tokens: Tensor, slot: Tensor, law: Tensor
    ) -> None:
        token = tokens.gather(1, slot[:, None])[:, 0]
        self.outcomes.append(
            (origin, hash_rows(torch.cat(given, 1)), weight[:, None] * (F.one_hot(token, 3) - law))
        )


def text_before(tokens: Tensor, slot: Tensor) -> Tensor:
    """Slots and the tokens before them."""
    return torch.cat(
        [slot[:, None], tokens.masked_fill(torch.arange(tokens.shape[1]) >= slot[:, None], 0)], 1
    )


def check_labels(found: Enumeration, length: int) -> None:
    """After each call the next slot's draft follows its label, given the committed tokens and that label (DESIGN.md 6,
    the lemma)."""
    number, text, label, token = [], [], [], []
    for layer in found.layers:
        going = layer.rows((layer.state.lengths < length).nonzero()[:, 0])
        state = going.state
        number.append(going.origin)
        text.append(text_before(state.tokens, state.lengths))
        label.append(labels(state)[:, 0].exp())
        token.append(state.tokens.gather(1, state.lengths[:, None])[:, 0])
    numbers, given, draft = torch.cat(number), torch.cat(label), torch.cat(token)
    first, group = distinct(hash_rows(torch.cat([torch.cat(text), quantised(given)], 1)))
    for visits in found.by_call:
        weight = visits[numbers]
        drawn = torch.zeros(len(first), 3, dtype=torch.float64)
        drawn.index_put_((group, draft), weight, accumulate=True)
        labelled = torch.zeros(len(first), 3, dtype=torch.float64)
        labelled.index_add_(0, group, weight[:, None] * given)
        assert (drawn - labelled).abs().max() < 1e-10


def check(
    name: str, window: int, coupling: str, initial_draft: str, law: TokenLaw = PLAIN, seed: int = 0
) -> None:
    model = three_tokens(seed=seed)
    enumerator = Checked(sampler_of(name, window, coupling, initial_draft), model, law)
    found = enumerator.run()
    assert 0 < found.tested < 3 + 1e-10  # slot 0 has no draft
    # The meter against the enumerated distance of every slot, summed over the slots of a sample.
    assert found.moved == pytest.approx(enumerator.apart, rel=0.05)
    assert found.moved <= enumerator.apart + 1e-12
    if name in ONE_SIDED:
        assert found.moved == pytest.approx(enumerator.apart, abs=1e-12)
        assert found.moved <= RELAXATIONS[name].delta * found.tested + 1e-12
    # And the law of whole samples: as far from the model's as the slots say, at most.
    assert 0.2 * enumerator.apart < distance(found, model, law) <= enumerator.apart + 1e-12
    exact = Enumerator(SpeculativeJacobiSampler(window, coupling, "exact", initial_draft), model, law).run()
    if name != "grouped":  # which may withhold more than it gives
        assert found.calls < exact.calls - 1e-3
    assert exact.moved == exact.tested == 0


@pytest.mark.fast_sets(9)
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
    enumerator = Checked(sampler_of(name, 3, coupling, "left"), three_tokens(1, 5, seed=3))
    found = enumerator.run()
    assert found.moved == pytest.approx(enumerator.apart, rel=0.05)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_a_rule_that_relaxes_nothing_moves_nothing(coupling):
    rule = replace(EXACT, lossless=False)
    sampler = SpeculativeJacobiSampler(3, coupling, "exact", "left")
    found = Checked(sampler, three_tokens(), rule=rule).run()
    assert found.moved == 0 and found.tested > 1.5
    assert distance(found, three_tokens()) < 1e-10


@pytest.mark.parametrize("name, coupling", list(zip(RELAXATIONS, 2 * COUPLINGS, strict=True)))
def test_trace_reports_what_the_enumeration_says(name, coupling):
    sampler = sampler_of(name, 3, coupling, "left")
    expected = Enumerator(sampler, three_tokens(), codebook=CODEBOOK).run()
    check_reports(sampler, three_tokens(), expected)
