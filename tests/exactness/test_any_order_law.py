"""Any-order models: the exact law of the real steps, against a joint law that is written down."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.enumeration import distance as distance_of
from tests.exactness.regions import total_variation
from tests.helpers.order_laws import joint_along
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import halton_order
from visual_spec.samplers.orders.along_order import AlongOrder, AlongOrderSampler
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler

GIVEN = [2, 0, 3, 1]
ORDERS = {"raster": [0, 1, 2, 3], "halton": halton_order(1, 2, 2).tolist(), "given": GIVEN}
GUIDED = TokenLaw(guidance_scale=2.5)
ACCEPTANCES = ["identical", "exact"]


def table(seed: int = 0, width: int = 2) -> TabularAnyOrderModel:
    return TabularAnyOrderModel(TokenGrid(2, width), 3, seed=seed)


def setting(order: str) -> Any:
    return GIVEN if order == "given" else order


def law_of_groups(
    model: TabularAnyOrderModel, order: list[int], groups: list[int], law: TokenLaw = PLAIN
) -> Tensor:
    """The law by place, from sums over the joint: groups of places, each place given the groups before it."""
    count, size = len(order), model.vocab_size
    tables = model.joint.view(-1, *[size] * count).permute(0, *[1 + slot for slot in order])
    tables = tables[[0, len(tables) - 1][: 2 if law.guided else 1]]
    starts = [
        start
        for start, length in zip(itertools.accumulate([0, *groups]), groups, strict=False)
        for _ in range(length)
    ]
    found = []
    for tokens in itertools.product(range(size), repeat=count):
        probability = 1.0
        for place, start in enumerate(starts):
            left = tables[(slice(None), *tokens[:start])]  # the places from `start` on are free
            others = [1 + other - start for other in range(start, count) if other != place]
            logits = (left.sum(others) if others else left).log()[:, None]  # [1 or 2, 1, V]
            log_probs = law(logits, law.guided, torch.tensor([[place]]))[0, 0]
            probability *= float(log_probs[tokens[place]].exp())
        found.append(probability)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_the_joint_is_the_law_of_every_order(order):
    """Of the reference here, and of one token a call."""
    model = table()
    want = joint_along(model, ORDERS[order])
    assert total_variation(law_of_groups(model, ORDERS[order], [1, 1, 1, 1]), want) < 1e-12
    found = Enumerator(AnyOrderSampler(setting(order)), model).run()
    assert total_variation(found.law, want) < 1e-10 and found.calls == 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_speculative_decoding_is_lossless(num_drafts, acceptance, order):
    model = table()
    found = Enumerator(SpeculativeAnyOrderSampler(num_drafts, setting(order), acceptance), model).run()
    assert distance_of(found, joint_along(model, ORDERS[order])) < 1e-10
    assert found.calls < 3.8 and len(found.by_call) <= 4


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize(
    "law",
    [GUIDED, TokenLaw(temperature=0.7, top_p=0.8), TokenLaw(temperature=0.0)],
    ids=["guidance", "filters", "greedy"],
)
def test_it_is_lossless_under_guidance_and_filters(law, acceptance):
    model = table(1)
    want = law_of_groups(model, GIVEN, [1, 1, 1, 1], law)
    for sampler in (SpeculativeAnyOrderSampler(2, GIVEN, acceptance), AnyOrderSampler(GIVEN)):
        assert total_variation(Enumerator(sampler, model, law).run().law, want) < 1e-10


@pytest.mark.parametrize(("steps", "groups"), [(2, [1, 5]), (3, [1, 2, 3]), (6, [1] * 6)])
@pytest.mark.parametrize("law", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_parallel_decoding_draws_each_group_given_those_before(steps, groups, law):
    model = TabularAnyOrderModel(TokenGrid(2, 3), 2)
    order = [4, 1, 5, 0, 3, 2]
    found = Enumerator(AnyOrderSampler(order, steps), model, law).run()
    want = law_of_groups(model, order, groups, law)
    assert total_variation(found.law, want) < 1e-10 and found.calls == steps
    if law is PLAIN:  # a law of its own, unless every group is one token
        assert (total_variation(want, joint_along(model, order)) > 1e-2) == (steps < 6)


def rising(scales: Tensor) -> Any:
    """A law whose guidance has these scales by place."""

    def law(logits: Tensor, guided: bool, places: Tensor) -> Tensor:
        given, other = logits.chunk(2)
        return (other + scales[places][..., None] * (given - other)).log_softmax(-1)

    law.guided = True  # type: ignore[attr-defined]
    return law


@pytest.mark.parametrize(
    ("schedule", "steps", "groups", "levels"),
    [
        ("randar", 3, [1, 2, 3], [0, 1, 1, 3, 3, 3]),
        ("lpd", 3, [1, 2, 3], [0, 1, 2, 3, 4, 5]),
        ("arpg", 2, [2, 4], [2, 2, 6, 6, 6, 6]),
        ("arpg", 3, [2, 1, 3], [2, 2, 3, 6, 6, 6]),
        ("arpg-cosine", 3, [1, 2, 3], [1, 3, 3, 6, 6, 6]),
    ],
)
def test_groups_and_their_rising_guidance_are_those_of_a_schedule(schedule, steps, groups, levels):
    """From 0.5 at the first of six places to 2.5 after the last, read where the schedule says."""
    model = TabularAnyOrderModel(TokenGrid(2, 3), 2, seed=1)
    order = [4, 1, 5, 0, 3, 2]
    law = rising(0.5 + 2.0 * torch.tensor(levels, dtype=torch.float64) / 6)
    want = law_of_groups(model, order, groups, law)
    found = Enumerator(AnyOrderSampler(order, steps, 0.5, schedule), model, GUIDED).run()
    assert total_variation(found.law, want) < 1e-10 and found.calls == steps


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
def test_it_is_lossless_under_guidance_that_rises(acceptance):
    """From 0.5 at the first place to 2.5 after the last of four: 0.5, 1, 1.5, 2."""
    model = table(1)
    start: dict[str, Any] = dict(guidance_start=0.5)
    law = rising(torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64))
    want = law_of_groups(model, GIVEN, [1, 1, 1, 1], law)
    for sampler in (
        SpeculativeAnyOrderSampler(2, GIVEN, acceptance, **start),
        AnyOrderSampler(GIVEN, **start),
    ):
        assert total_variation(Enumerator(sampler, model, GUIDED).run().law, want) < 1e-10


@pytest.mark.parametrize("law", [PLAIN, GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize(
    "sampler",
    [AnyOrderSampler, *(partial(SpeculativeAnyOrderSampler, 2, acceptance=rule) for rule in ACCEPTANCES)],
    ids=["one a call", *ACCEPTANCES],
)
def test_the_others_have_the_law_that_known_tokens_leave(sampler, law, monkeypatch):
    """Slots 1 and 3 are known; GIVEN then decodes slots 2 and 0, and a row may know more than another."""
    model, known = table(), torch.tensor([[-1, 2, -1, 0]])
    plan = AlongOrderSampler.plan

    def knowing(self, run):
        run.parts = {"known_tokens": known.expand(run.batch_size, -1)}
        plan(self, run)

    monkeypatch.setattr(AlongOrderSampler, "plan", knowing)
    found = Enumerator(sampler(order=GIVEN), model, law, known_tokens=known).run()
    places = [3, 1, 2, 0]
    whole = law_of_groups(model, places, [1, 1, 1, 1], law).view(3, 3, 3, 3)
    want = torch.zeros_like(whole)
    want[0, 2] = whole[0, 2] / whole[0, 2].sum()
    assert total_variation(found.law, want.flatten()) < 1e-10


def expected_calls(joint: Tensor, num_drafts: int) -> float:
    """The mean number of calls of ASSD on a joint [V, ..., V] along its axes, by recursion over all that may happen."""
    count, size = joint.dim(), len(joint)

    def law(known: tuple[int, ...], place: int) -> Tensor:
        left = joint[known]
        others = [other - len(known) for other in range(len(known), count) if other != place]
        left = left.sum(others) if others else left
        return left / left.sum()

    def draft(known: tuple[int, ...]) -> float:
        """Calls from a drafting one on; its first place stands."""
        if len(known) == count:
            return 0.0
        first, after = law(known, len(known)), range(len(known) + 1, min(len(known) + 1 + num_drafts, count))
        drafts = [law(known, place) for place in after]
        return 1 + sum(float(first[x]) * verify((*known, x), drafts) for x in range(size))

    def verify(known: tuple[int, ...], drafts: list[Tensor]) -> float:
        return 0.0 if len(known) == count else 1 + walk(known, drafts)

    def walk(known: tuple[int, ...], drafts: list[Tensor]) -> float:
        """Calls after a verifying one, from its first open draft on."""
        if len(known) == count:
            return 0.0
        target = law(known, len(known))
        kept = target.minimum(drafts[0]) if drafts else torch.zeros_like(target)  # then the bonus
        return sum(
            float(kept[x]) * (walk((*known, x), drafts[1:]) if drafts else 0.0)
            + float(target[x] - kept[x]) * draft((*known, x))
            for x in range(size)
        )

    return draft(())


@pytest.mark.parametrize(
    ("length", "size", "num_drafts"), [(3, 3, 1), (5, 2, 1), (5, 2, 2), (6, 2, 1), (6, 2, 3)]
)
def test_the_number_of_calls_is_told_by_the_joint(length, size, num_drafts):
    model = TabularAnyOrderModel(TokenGrid(1, length), size)
    found = Enumerator(SpeculativeAnyOrderSampler(num_drafts, "raster", "exact"), model).run()
    want = expected_calls(model.joint[0].view([size] * length), num_drafts)
    assert 2 < want < length and found.calls == pytest.approx(want, abs=1e-10)


# -- planted bugs ----------------------------------------------------------------------------------------------------


def distance(acceptance: str = "exact") -> float:
    model = table()
    found = Enumerator(SpeculativeAnyOrderSampler(2, GIVEN, acceptance), model).run()
    return float(total_variation(found.law, joint_along(model, GIVEN)))


def test_catches_a_verifying_call_whose_positions_see_no_drafts(monkeypatch):
    real = AlongOrder.ask

    def blind(self: Any, state: Any, tokens: Tensor, places: Tensor, known: Tensor) -> Tensor:
        return real(self, state, tokens, places, known.minimum(known[:, :1] + 1))

    monkeypatch.setattr(AlongOrder, "ask", blind)
    assert distance() > 1e-2


def test_catches_a_mask_by_slot_in_the_place_of_the_order(monkeypatch):
    real = AlongOrder.ask

    def by_slot(self: Any, state: Any, tokens: Tensor, places: Tensor, known: Tensor) -> Tensor:
        state.rank, rank = torch.arange(4).expand_as(state.rank), state.rank
        found = real(self, state, tokens, places, known)
        state.rank = rank
        return found

    monkeypatch.setattr(AlongOrder, "ask", by_slot)
    assert distance() > 1e-2


def test_catches_drafts_that_know_more_than_their_label_says(monkeypatch):
    """Labels of the call before the last token: the law of another context."""
    real = SpeculativeAnyOrderSampler._draft

    def mislabelled(self: Any, run: Any, state: Any, logits: Tensor) -> None:
        real(self, run, state, logits)
        state.laws = run.law(logits.roll(1, 1), state.next_slots(2), False)

    monkeypatch.setattr(SpeculativeAnyOrderSampler, "_draft", mislabelled)
    assert distance() > 1e-3


def test_catches_a_second_draft_that_always_stands(monkeypatch):
    """Only the first place of a drafting call is asked as one token a call would ask it."""
    real = SpeculativeAnyOrderSampler.propose

    def trusted(self: Any, run: Any, state: Any) -> Any:
        draft: Any = real(self, run, state)
        draft.label.laws = torch.full_like(draft.label.laws, -50.0)  # accepted whatever the target says
        return draft

    monkeypatch.setattr(SpeculativeAnyOrderSampler, "propose", trusted)
    assert distance() > 1e-2
