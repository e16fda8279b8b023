"""Kernel level: the one-slot law of every relaxed rule, in float64, against the papers' definitions in plain Python."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers.relaxed_rules import (
    codes,
    every_draft,
    gsd_acceptance,
    lent,
    many_laws,
    nearest,
    one_slot,
    pairs,
    tv,
)
from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule, Relaxation, residual
from visual_spec.samplers.core.relaxed import (
    bounded_acceptance,
    clustered_acceptance,
    grouped_acceptance,
    lantern_acceptance,
    lantern_target,
    neighbour_table,
    rule_of,
)

ROUNDING = 1e-12


def laws(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Target and draft laws [N, V]: those of the exact rule's tests, and targets with many equal probabilities."""
    target, draft = (law[:, 0] for law in pairs(vocab_size, count=40))
    tied = target[:80].exp().mul(4).round().add(0.5).log()
    tied = tied.masked_fill(target[:80].isneginf(), -torch.inf).log_softmax(-1)
    return torch.cat([target, tied]), torch.cat([draft, draft[:80]])


def moved(keep: Tensor, target: Tensor, draft: Tensor) -> Tensor:
    return (draft.exp() * keep - target.exp()).clamp(min=0).sum(-1)


# ------------------------------------------------------------------------------------- the papers, in plain Python


def lantern_law(p: list, q: list, code: list, count: int, delta: float, factor: float | None) -> list:
    law = [0.0] * len(p)
    for x in range(len(p)):
        if q[x] == 0:
            continue
        merged = list(p)
        for y in lent(p, x, nearest(code, x)[:count], delta, factor):
            merged[x] += merged[y]
            merged[y] = 0.0
        keep = min(1, merged[x] / q[x])
        law[x] += q[x] * keep
        rest = [max(0, merged[y] - q[y]) for y in range(len(p))]
        for y in range(len(p)):
            law[y] += q[x] * (1 - keep) * (rest[y] / sum(rest) if sum(rest) else merged[y])
    return law


# ------------------------------------------------------------------------------------------------------------- GSD


@pytest.mark.parametrize("vocab_size", [2, 7, 23])
@pytest.mark.parametrize(
    "size, gap, distance", [(1, 1.0, None), (2, 1.0, None), (5, 0.15, 0.5), (14, 0.15, None), (14, 0.05, 1.5)]
)
def test_grouped_acceptance_is_that_of_the_paper(vocab_size, size, gap, distance):
    target, draft = laws(vocab_size)
    book = codes(vocab_size)
    rule = AcceptanceRule(
        partial(grouped_acceptance, size=size, gap=gap, distance=distance, codebook=book.double())
    )
    keep, law = one_slot(rule, target, draft)
    for p, q, found in zip(target.tolist(), draft.exp().tolist(), keep.tolist(), strict=True):
        for x in range(vocab_size):
            if q[x] > 0:
                expected = gsd_acceptance(p, q, x, size, gap, distance, book.double().tolist())
                assert found[x] == pytest.approx(expected, abs=ROUNDING)
    # Refused drafts are replaced from the plain residual.
    chance = draft.exp()
    refused = (chance * (1 - keep)).sum(-1, keepdim=True)
    expected = chance * keep + refused * residual(target, draft).exp()
    torch.testing.assert_close(law, expected, atol=ROUNDING, rtol=0)


def test_a_group_is_cut_off_at_the_ends_of_the_order():
    target = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64).log().expand(1, 4, 4)
    draft = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]], dtype=torch.float64).log().expand(1, 4, 4)
    drafts = torch.arange(4)[None]
    # Size 4: two below, the draft, one above.
    keep = grouped_acceptance(target, draft, drafts, size=4, gap=1.0)
    expected = [(0.1 + 0.2) / (0.4 + 0.3), (0.1 + 0.2 + 0.3) / (0.4 + 0.3 + 0.2), 1, 1]
    torch.testing.assert_close(keep[0], torch.tensor(expected, dtype=torch.float64))


def test_equal_probabilities_are_ordered_by_id():
    target = torch.full((1, 6, 6), 1 / 6, dtype=torch.float64).log()
    draft = torch.tensor([0.3, 0.1, 0.1, 0.2, 0.1, 0.2], dtype=torch.float64).log().expand(1, 6, 6)
    # Size 3: the id before, the draft, the id after.
    keep = grouped_acceptance(target, draft, torch.arange(6)[None], size=3, gap=1.0)
    ratios = [2 / 6 / 0.4, 1, 1, 1, 1, 1]
    torch.testing.assert_close(keep[0], torch.tensor(ratios, dtype=torch.float64))


def test_the_filters_leave_out_what_lies_at_their_limit():
    target = torch.tensor([[[0.125, 0.375, 0.5]]], dtype=torch.float64).log()
    draft = torch.tensor([[[0.75, 0.125, 0.125]]], dtype=torch.float64).log()
    book = torch.tensor([[0.0], [1.0], [2.0]])

    def keep(**options) -> float:
        drafts = torch.zeros(1, 1, dtype=torch.long)
        return grouped_acceptance(target, draft, drafts, size=5, codebook=book, **options).item()

    alone, pair, all_three = 0.125 / 0.75, 0.5 / 0.875, 1.0
    assert keep(gap=1.0) == pytest.approx(all_three)
    assert keep(gap=0.3) == pytest.approx(pair) and keep(gap=0.2) == pytest.approx(alone)
    assert keep(gap=1.0, distance=4.0) == pytest.approx(pair)  # the squared distance to the third is 4
    assert keep(gap=1.0, distance=1.0) == pytest.approx(alone)
    assert keep(gap=0.0, distance=0.0) == pytest.approx(alone)
    target = torch.full((1, 1, 3), 1 / 3, dtype=torch.float64).log()
    assert keep(gap=0.0) == pytest.approx((1 / 3) / 0.75) and keep(gap=1e-9) == pytest.approx(1)


@pytest.mark.parametrize("vocab_size", [7, 23])
def test_clustered_acceptance_is_the_ratio_of_the_masses_of_the_cluster(vocab_size):
    target, draft = laws(vocab_size)
    clusters = torch.randint(0, 4, (vocab_size,), generator=torch.Generator().manual_seed(0))
    keep, _ = one_slot(AcceptanceRule(partial(clustered_acceptance, clusters=clusters)), target, draft)
    for p, q, found in zip(target.exp().tolist(), draft.exp().tolist(), keep.tolist(), strict=True):
        for x in range(vocab_size):
            if q[x] > 0:
                group = [y for y in range(vocab_size) if clusters[y] == clusters[x]]
                ratio = sum(p[y] for y in group) / sum(q[y] for y in group)
                assert found[x] == pytest.approx(min(1, ratio) if p[x] > 0 else 0, abs=ROUNDING)


@pytest.mark.parametrize("size", [2, 5, 14])
def test_what_groups_move_bounds_the_distance_together_with_what_they_withhold(size):
    target, draft = laws(23)
    rule = AcceptanceRule(partial(grouped_acceptance, size=size))
    keep, law = one_slot(rule, target, draft)
    exact, _ = one_slot(EXACT, target, draft)
    gained, apart = moved(keep, target, draft), tv(law, target)
    withheld = (draft.exp() * (exact - keep).clamp(min=0)).sum(-1)
    assert (apart >= gained - ROUNDING).all() and (apart <= torch.maximum(gained, withheld) + ROUNDING).all()
    more = gained >= withheld
    assert 0.1 < more.double().mean() < 1  # both happen
    torch.testing.assert_close(apart[more], gained[more], atol=ROUNDING, rtol=0)


# --------------------------------------------------------------------------------------------------------- LANTERN


def lantern(vocab_size: int, count: int, delta: float, factor: float | None = None) -> AcceptanceRule:
    options = dict(neighbours=neighbour_table(codes(vocab_size), count), delta=delta, factor=factor)
    return AcceptanceRule(partial(lantern_acceptance, **options), partial(lantern_target, **options))


@pytest.mark.parametrize("vocab_size, count", [(2, 1), (7, 3), (7, 6), (23, 9)])
@pytest.mark.parametrize("delta, factor", [(0.05, None), (0.3, None), (1.0, None), (0.0, 1.5), (0.0, 8.0)])
def test_lantern_with_its_residual_gives_the_law_of_the_paper(vocab_size, count, delta, factor):
    target, draft = laws(vocab_size)
    _, law = one_slot(lantern(vocab_size, count, delta, factor), target, draft)
    book = codes(vocab_size).tolist()
    expected = [
        lantern_law(p, q, book, count, delta, factor)
        for p, q in zip(target.exp().tolist(), draft.exp().tolist(), strict=True)
    ]
    torch.testing.assert_close(law, torch.tensor(expected, dtype=torch.float64), atol=ROUNDING, rtol=0)


# At which uniform number `evaluate_posterior_v1` of github.com/jadohu/LANTERN (ea_model_llamagen.py) begins to refuse
# each draft of the laws below, with four neighbours by raw codes; by its `lantern_delta`, which above 1 is a factor.
RELEASED = {
    0.1: [0.241345, 1, 1, 0.047157, 1, 1, 1, 0.44026, 1, 1, 1, 0.447065],
    0.3: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.662921],
    1.5: [0.241345, 1, 1, 0.047157, 1, 1, 0.663088, 0.059732, 1, 1, 0.140837, 0.145368],
    8.0: [1, 1, 1, 0.047157, 1, 1, 0.663088, 0.059732, 1, 1, 0.140837, 0.662921],
}


@pytest.mark.parametrize("number", RELEASED)
def test_lantern_keeps_drafts_as_often_as_the_public_code(number):
    place = torch.arange(12, dtype=torch.float64)
    target, draft = ((3 * torch.sin(1.7 * place + start)).log_softmax(0)[None] for start in (0.4, 1.6))
    raw = torch.stack([torch.sin(2.3 * place), (1 + place / 4) * torch.cos(1.1 * place)], 1)
    settings = {"factor": number} if number > 1 else {"delta": number}
    want = torch.tensor([RELEASED[number]], dtype=torch.float64)
    keep = [
        rule_of(Relaxation("lantern", neighbours=4, **settings), book.float(), "cpu").probability(
            every_draft(target)[0], every_draft(draft)[0], every_draft(target)[1]
        )
        for book in (raw, torch.nn.functional.normalize(raw, dim=1))
    ]
    torch.testing.assert_close(keep[0], want, atol=1e-6, rtol=0)
    assert (keep[1] - want).abs().max() > 0.01  # other neighbours


@pytest.mark.parametrize("delta", [0.05, 0.2])
def test_lantern_moves_a_point_draft_by_at_most_delta_and_a_drawn_one_by_more(delta):
    vocab_size = 23
    target, draft = laws(vocab_size)
    target, draft = target[:40], draft[:40]
    rule = lantern(vocab_size, 22, delta)
    point = torch.full((vocab_size, vocab_size), -torch.inf, dtype=torch.float64).fill_diagonal_(0)
    wide = target[:, None].expand(-1, vocab_size, -1).flatten(0, 1)
    keep, law = one_slot(rule, wide, point.repeat(len(target), 1))
    apart = tv(law, wide)
    assert apart.max() <= delta + ROUNDING
    assert apart.max() > 0.8 * delta
    merged = rule.refused_target(wide[:, None], torch.arange(vocab_size).repeat(len(target))[:, None])
    torch.testing.assert_close(law, merged[:, 0].exp(), atol=ROUNDING, rtol=0)  # the law is the merged target

    keep, law = one_slot(rule, target, draft)
    apart, most = tv(law, target), tv(draft.exp(), target)
    assert apart.max() > 2 * delta
    assert (apart <= most + ROUNDING).all() and (apart >= moved(keep, target, draft) - ROUNDING).all()


# ------------------------------------------------------------------------------------------------------ all of them


def relaxed(vocab_size: int) -> dict[str, AcceptanceRule]:
    clusters = torch.arange(vocab_size) // 4
    return {
        "grouped": AcceptanceRule(partial(grouped_acceptance, size=14)),
        "clustered": AcceptanceRule(partial(clustered_acceptance, clusters=clusters)),
        "lantern": lantern(vocab_size, vocab_size - 1, 0.2),
        "lantern++": lantern(vocab_size, vocab_size - 1, 0.0, 4.0),
        "everything": AcceptanceRule(lambda target, draft, drafts: torch.ones(drafts.shape).to(target)),
    }


@pytest.mark.parametrize(
    "settings",
    [
        dict(acceptance="grouped", group_size=1),
        dict(acceptance="grouped", group_size=9, code_distance=None, probability_gap=0.0),
        dict(acceptance="grouped", group_size=9, code_distance=0.0),
        dict(acceptance="clustered", group_size=1),
        dict(acceptance="lantern", delta=0.0),
        dict(acceptance="lantern", factor=1.0),
        dict(acceptance="lantern", delta=0.0, factor=3.0, bounded=True),
        dict(acceptance="grouped", delta=0.0, bounded=True),
    ],
)
def test_settings_that_relax_nothing_are_the_exact_rule(settings):
    target, draft = laws(7)
    book = torch.nn.functional.normalize(
        torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    rule = rule_of(Relaxation(**{"neighbours": 6, **settings}), book, "cpu")
    keep, law = one_slot(rule, target, draft)
    torch.testing.assert_close(keep, one_slot(EXACT, target, draft)[0], atol=ROUNDING, rtol=0)
    torch.testing.assert_close(law, target.exp(), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", ["grouped", "clustered", "lantern", "lantern++"])
def test_a_token_that_the_target_law_forbids_is_never_kept(name):
    target, draft = laws(23)
    keep, law = one_slot(relaxed(23)[name], target, draft)
    forbidden = target.isneginf() & ~draft.isneginf()
    assert forbidden.sum() > 100
    assert (keep[forbidden] == 0).all() and law[target.isneginf()].abs().max() == 0


@pytest.mark.parametrize("name", ["grouped", "clustered", "lantern", "lantern++"])
def test_float32_laws_keep_their_dtype_and_agree(name):
    target, draft = laws(7)
    rule = relaxed(7)[name]
    keep, law = one_slot(rule, target, draft)
    single = one_slot(rule, target.float(), draft.float())
    assert single[0].dtype == single[1].dtype == torch.float32
    agree = (single[0] - keep).abs() < 1e-4  # a group may gain or lose a token that lies at its limit
    assert agree.double().mean() > 0.99


# --------------------------------------------------------------------------------------------------------- bounded


def bounded(rule: AcceptanceRule, delta: float) -> AcceptanceRule:
    def probability(target: Tensor, draft: Tensor, drafts: Tensor) -> Tensor:
        return bounded_acceptance(rule.probability(target, draft, drafts), target, draft, drafts, delta=delta)

    return AcceptanceRule(probability)


@pytest.mark.parametrize("name", ["grouped", "clustered", "lantern", "lantern++", "everything"])
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.5])
def test_bounded_rules_keep_the_committed_law_within_delta(name, delta):
    for vocab_size, seed in ((3, 0), (8, 1), (23, 2)):
        target, draft = many_laws(vocab_size, 1500, seed)
        rule = relaxed(vocab_size)[name]
        keep, law = one_slot(bounded(rule, delta), target, draft)
        apart = tv(law, target)
        assert apart.max() <= delta + ROUNDING
        if vocab_size == 23 and delta < 0.5:
            assert tv(one_slot(rule, target, draft)[1], target).max() > 2 * delta  # the rule itself does not
        # What the meter counts is the distance, and drafts are kept more often by just that.
        torch.testing.assert_close(apart, moved(keep, target, draft), atol=ROUNDING, rtol=0)
        exact, _ = one_slot(EXACT, target, draft)
        assert (keep >= exact - ROUNDING).all()
        gain = (draft.exp() * (keep - exact)).sum(-1)
        torch.testing.assert_close(gain, apart, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("name", ["lantern", "everything"])
def test_no_search_finds_laws_that_a_bounded_rule_moves_further(name):
    """Hill climbing on the distance itself, from a thousand starts."""
    delta, vocab_size = 0.1, 6
    rule = bounded(relaxed(vocab_size)[name], delta)
    generator = torch.Generator().manual_seed(0)
    target, draft = many_laws(vocab_size, 1000, 5)
    best = tv(one_slot(rule, target, draft)[1], target)
    for step in range(30):
        size = 2.0 / (1 + step / 5)
        steps = [size * torch.randn(target.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        trial = [(law + step).log_softmax(-1) for law, step in zip((target, draft), steps, strict=True)]
        found = tv(one_slot(rule, *trial)[1], trial[0])
        better = (found > best)[:, None]
        target, draft = torch.where(better, trial[0], target), torch.where(better, trial[1], draft)
        best = torch.maximum(best, found)
    assert best.max() <= delta + ROUNDING
    assert best.median() > 0.99 * delta  # the climb does reach the bound


def test_bounded_lantern_is_lantern_for_a_point_draft():
    target, _ = laws(7)
    plain = lantern(7, 6, 0.2)
    draft = torch.full((7, 7), -torch.inf, dtype=torch.float64).fill_diagonal_(0).repeat(len(target), 1)
    wide = target.repeat_interleave(7, 0)
    keep, law = one_slot(bounded(plain, 0.2), wide, draft)
    torch.testing.assert_close(keep, one_slot(plain, wide, draft)[0], atol=ROUNDING, rtol=0)
    assert tv(law, wide).max() <= 0.2 + ROUNDING


def test_bounded_rules_hold_nothing_back_where_the_laws_are_near():
    target, draft = many_laws(23, 500, 7)
    apart = tv(draft.exp(), target)
    near = apart < 0.1
    assert near.sum() > 50
    keep, law = one_slot(bounded(relaxed(23)["everything"], 0.1), target[near], draft[near])
    assert (keep == 1).all()
    torch.testing.assert_close(law, draft[near].exp(), atol=ROUNDING, rtol=0)


def test_bounded_rules_give_back_what_groups_withhold():
    target, draft = laws(23)
    exact, _ = one_slot(EXACT, target, draft)
    plain = AcceptanceRule(partial(grouped_acceptance, size=3))
    assert (one_slot(plain, target, draft)[0] < exact - 1e-3).any()
    assert (one_slot(bounded(plain, 0.0), target, draft)[0] >= exact - ROUNDING).all()


def test_equal_laws_leave_nothing_to_divide():
    law = torch.tensor([[[0.25, 0.75]]], dtype=torch.float64).log()
    drafts = torch.zeros(1, 1, dtype=torch.long)
    assert bounded_acceptance(torch.ones(1, 1), law, law, drafts, delta=0.1).item() == 1
