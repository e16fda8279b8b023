"""Samplers of any-order models: tokens, numbers of calls, refusals. Laws: tests/exactness/test_any_order_law.py."""

import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularMaskedModel, TabularModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import halton_order
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.orders.along_order import AlongOrder
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler
from visual_spec.samplers.orders.locality import locality_order

MODEL = TabularAnyOrderModel(TokenGrid(2, 4), 3, conditions=3)
LENGTH = 8
GIVEN = [5, 0, 7, 2, 1, 6, 3, 4]
LAW = TokenLaw(guidance_scale=1.7, temperature=0.6)


def decode(
    sampler: Any, samples: Any = range(5), model: Any = MODEL, law: TokenLaw = LAW, **more: Any
) -> Any:
    tables = torch.tensor([sample % 3 for sample in samples])
    return sampler(model, tables, law=law, generator=seeded(*samples), batch_size=len(samples), **more)


@pytest.mark.parametrize("order", ["random", "halton", "rolled_halton", "raster", GIVEN])
def test_speculative_decoding_gives_the_tokens_of_one_a_call(order):
    plain = decode(AnyOrderSampler(order))
    assert plain.trace.target_calls.tolist() == [LENGTH] * 5
    assert plain.trace.promise == ("identical" if order == "random" else "another law")
    for row in plain.trace.commit_call:
        assert sorted(row.tolist()) == list(range(LENGTH))
    for num_drafts in (1, 3, 9):
        fast = decode(SpeculativeAnyOrderSampler(num_drafts, order))
        assert torch.equal(fast.tokens, plain.tokens)
        assert (fast.trace.target_calls <= LENGTH).all() and fast.trace.target_calls.sum() < 5 * LENGTH
        assert torch.equal(
            decode(SpeculativeAnyOrderSampler(num_drafts, order), [3]).tokens[0], plain.tokens[3]
        )


@pytest.mark.parametrize("acceptance", ["identical", "exact"])
@pytest.mark.parametrize("num_drafts", [1, 2, 7])
@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_no_sample_takes_more_calls_than_tokens(scale, num_drafts, acceptance):
    """Also where drafts are hardly ever kept; where they are always kept, two calls commit all that they can."""
    model = TabularAnyOrderModel(TokenGrid(1, 7), 3, scale=scale, seed=2)
    sampler = SpeculativeAnyOrderSampler(num_drafts, "raster", acceptance)
    trace = sampler(model, None, law=TokenLaw(), generator=seeded(*range(12)), batch_size=12).trace
    assert int(trace.target_calls.max()) <= 7
    if scale == 0:  # tokens are independent: every draft has the law that it is tested against
        pair = num_drafts + 2
        assert trace.target_calls.unique().tolist() == [{1: 5, 2: 4, 7: 2}[num_drafts]]
        assert trace.commit_call[0].tolist() == [2 * (slot // pair) + (slot % pair > 0) for slot in range(7)]
    # A drafting call commits one place, in the order.
    for row in trace.commit_call:
        counts = row.bincount(minlength=7)
        assert (counts[::2] <= 1).all() and (row.diff() >= 0).all()


def test_the_order_is_that_of_the_grid():
    def order_of(sampler: Any, seed: int = 0) -> list[int]:
        calls = sampler(MODEL, None, law=TokenLaw(), generator=seeded(seed)).trace.commit_call[0]
        return calls.argsort().tolist()

    assert order_of(AnyOrderSampler("halton")) == halton_order(1, 2, 4).tolist()
    assert order_of(AnyOrderSampler(GIVEN)) == GIVEN and order_of(AnyOrderSampler("raster")) == list(
        range(LENGTH)
    )
    found = [order_of(AnyOrderSampler(), seed) for seed in range(4)]
    assert len({tuple(order) for order in found}) > 1


@pytest.mark.parametrize("steps", [2, 5, 8])
def test_parallel_decoding_takes_as_many_calls_as_asked_for(steps):
    sampler = AnyOrderSampler(GIVEN, steps)
    trace = decode(sampler).trace
    assert (trace.target_calls == steps).all()
    assert not trace.lossless and not trace.identical
    groups = torch.tensor(sampler.bounds(LENGTH)).diff()
    assert (
        torch.equal(trace.commit_call[0][GIVEN].bincount(), groups)
        and (trace.commit_call[0][GIVEN].diff() >= 0).all()
    )


def test_the_schedule_is_a_cosine():
    """By hand for 256 tokens: one, then the whole part of 1 + 256 (1 - cos(pi s / 2 S)) after call s of S."""
    for steps in (2, 7, 64, 88, 256):
        bounds = AnyOrderSampler(steps=steps).bounds(256)
        assert len(bounds) == steps + 1 and (bounds[:2], bounds[-1]) == ((0, 1), 256)
        for step in range(2, steps + 1):
            reached = math.floor(1 + 256 * (1 - math.cos(math.pi * step / steps / 2)))
            assert bounds[step] == min(256, max(bounds[step - 1] + 1, reached))
    assert AnyOrderSampler().bounds(5) == (0, 1, 2, 3, 4, 5)
    assert AnyOrderSampler(steps=1).bounds(1) == (0, 1)


# Sizes of the groups in the table of LPD's public code, for its published numbers of calls and for others.
LPD_SIZES = {
    (256, 12): [1, 7, 11, 15, 19, 22, 25, 28, 30, 32, 33, 33],
    (256, 16): [1, 4, 6, 8, 11, 13, 15, 17, 19, 20, 22, 23, 24, 24, 24, 25],
    (256, 20): [1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 18, 19, 19, 20, 20, 20],
    (256, 32): [1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 10, *[11] * 4, *[12] * 8],
    (256, 64): [*[1] * 10, *[2] * 7, *[3] * 7, *[4] * 9, *[5] * 11, *[6] * 20],
    (1024, 48): [
        *range(1, 23),
        23,
        23,
        24,
        25,
        26,
        26,
        27,
        28,
        28,
        29,
        29,
        30,
        30,
        31,
        31,
        *[32] * 3,
        *[33] * 7,
        34,
    ],
}


def test_other_schedules_have_the_groups_of_their_public_codes():
    for (tokens, calls), sizes in LPD_SIZES.items():
        bounds = AnyOrderSampler(steps=calls, schedule="lpd").bounds(tokens)
        assert [after - before for before, after in pairwise(bounds)] == sizes
    for calls in (2, 5, 64, 256):  # what is hidden after a call: the whole part of a share, at least a slot
        for name, share in (
            ("arpg", lambda u: math.acos(u) / (math.pi / 2)),
            ("arpg-cosine", lambda u: math.cos(math.pi / 2 * u)),
        ):
            bounds = AnyOrderSampler(steps=calls, schedule=name).bounds(256)
            assert (len(bounds), bounds[0], bounds[-1]) == (calls + 1, 0, 256)
            for call in range(1, calls):
                assert bounds[call] == 256 - max(
                    1, min(255 - bounds[call - 1], int(256 * share(call / calls)))
                )


def _steps(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def test_locality_draws_beside_what_is_drawn_and_apart_from_its_call():
    """On 8 x 8 slots: by the definition, slot after slot of each group, until no slot is near and far enough."""
    sampler = AnyOrderSampler("locality", 8, schedule="lpd", repulsion=1)
    bounds, grid = sampler.bounds(64), TokenGrid(8, 8)
    keys = draw_keys(seeded(3, 4), 2)
    orders = sampler.order_of(grid, keys).tolist()
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(64)) and orders[0] != orders[1]
    places = [(slot // 8, slot % 8) for slot in orders[0]]
    for start, end in pairwise(bounds[1:]):
        drawn, group = places[:start], places[start:end]
        scores = {
            (row, column): sum(
                1 / math.dist((row, column), other)
                for other in drawn
                if max(abs(row - other[0]), abs(column - other[1])) == 1
            )
            for row, column in itertools.product(range(8), repeat=2)
            if (row, column) not in drawn
        }
        for place, slot in enumerate(group):
            free = [
                other
                for other, score in scores.items()
                if score >= 1 and all(_steps(other, one) > 1 for one in group[:place])
            ]
            if free:
                assert slot in free and scores[slot] == pytest.approx(max(scores[other] for other in free))
            elif len(scores) - len(group) > 0:  # the farthest from its own call
                left = [other for other in scores if other not in group[:place]]
                apart = {other: min(math.dist(other, one) for one in group[:place]) for other in left}
                assert apart[slot] == pytest.approx(max(apart.values()))
    alone = sampler.order_of(grid, draw_keys(seeded(4), 1)).tolist()
    assert alone[0] == orders[1]
    with pytest.raises(ValueError, match="2 frames"):
        sampler(TabularAnyOrderModel(TokenGrid(2, 2, 2), 2), None, law=TokenLaw())


# Orders of the public code (`lpd_order_schedule` of mit-han-lab/lpd) on 6 x 6 slots in groups of 1, 3, 4, 6, 7, 7, 8,
# by repulsion, which is the seed of the numbers too that stand for its shuffles.
PUBLISHED_ORDERS = {
    1: [9, 3, 15, 30, 8, 10, 21, 24, 16, 14, 2, 4, 31, 18, 25, 22, 13, 11,
        1, 35, 33, 19, 7, 17, 28, 5, 32, 12, 20, 23, 6, 34, 26, 27, 29, 0],
    2: [7, 13, 35, 5, 14, 34, 11, 30, 8, 29, 31, 21, 0, 18, 28, 1, 19, 4,
        15, 32, 17, 20, 2, 23, 10, 24, 6, 33, 25, 16, 9, 22, 27, 26, 12, 3],
}  # fmt: skip


@pytest.mark.parametrize("repulsion", PUBLISHED_ORDERS)
def test_locality_gives_the_orders_of_its_public_code(repulsion):
    ties = np.random.default_rng(repulsion).random((7, 36))
    sizes = [1, 3, 4, 6, 7, 7, 8]
    assert locality_order(sizes, 6, 6, ties, repulsion) == PUBLISHED_ORDERS[repulsion]


def test_a_callback_ends_the_decode():
    tokens = decode(AnyOrderSampler(GIVEN)).tokens
    for sampler in (AnyOrderSampler(GIVEN), SpeculativeAnyOrderSampler(2, GIVEN)):
        found = decode(sampler, callback=lambda call, lengths: STOP if call == 3 else None)
        done = found.trace.commit_call >= 0
        assert found.trace.stopped and torch.equal(found.tokens[done], tokens[done])
        assert (done.sum(1) >= 4).all() and not done.all()


KNOWN = torch.full((4, LENGTH), -1)  # by slot: none, three, seven, and three others
KNOWN[1, [0, 3, 6]] = torch.tensor([2, 0, 1])
KNOWN[2, 1:] = torch.arange(7) % 3
KNOWN[3, [5, 6, 7]] = 1


@pytest.mark.parametrize("order", ["random", GIVEN])
def test_known_tokens_stay_and_a_row_does_not_depend_on_what_others_know(order):
    plain = decode(AnyOrderSampler(order), range(4), known_tokens=KNOWN)
    assert torch.equal(plain.tokens[KNOWN >= 0], KNOWN[KNOWN >= 0])
    assert plain.trace.known.tolist() == [0, 3, 7, 3]
    assert plain.trace.target_calls.tolist() == [9, 6, 2, 6]  # the first call feeds what is known
    assert plain.trace.tokens_per_call.tolist() == pytest.approx([8 / 9, 5 / 6, 1 / 2, 5 / 6])
    for sampler in (AnyOrderSampler(order), SpeculativeAnyOrderSampler(3, order), AnyOrderSampler(order, 3)):
        batch = decode(sampler, range(4), known_tokens=KNOWN)
        if batch.trace.identical:
            assert torch.equal(batch.tokens, plain.tokens)
        for row in range(4):
            alone = decode(sampler, [row], known_tokens=KNOWN[row, None])
            assert torch.equal(alone.tokens[0], batch.tokens[row])
    none = decode(AnyOrderSampler(order), range(4), known_tokens=torch.full_like(KNOWN, -1))
    assert torch.equal(none.tokens, decode(AnyOrderSampler(order), range(4)).tokens)
    assert none.trace.known is None


def test_what_one_of_two_rows_forbids_stays_forbidden_while_guidance_rises(monkeypatch):
    """Token 0 by the condition, token 1 without it: neither turns into a number or nan, from no guidance on."""
    scores = TabularAnyOrderModel._scores

    def forbidding(self: Any, *given: Any) -> Tensor:
        conditional, other = scores(self, *given).chunk(2)
        conditional[..., 0], other[..., 1] = -torch.inf, -torch.inf
        return torch.cat([conditional, other])

    monkeypatch.setattr(TabularAnyOrderModel, "_scores", forbidding)
    along = AlongOrder(MODEL, torch.tensor([GIVEN, GIVEN[::-1]]), first=3, ramp=(0.0, 2.0))
    state = along.prefill(torch.tensor([0, 2]), batch_size=2, guided=True, window=2)
    places = torch.arange(2).expand(2, -1)
    for logits in (state.logits, along(state, places % 3, places)):
        conditional, other = logits.chunk(2)
        assert conditional[..., :2].isneginf().all() and conditional[..., 2].isfinite().all()
        assert other[..., 1].isneginf().all() and other[..., [0, 2]].isfinite().all()


def test_known_tokens_that_cannot_be_kept_are_refused():
    for known, words in [
        (KNOWN[:3], r"known_tokens.*torch\.int64.*\(3, 8\).*int64 \(4, 8\).*-1"),
        (KNOWN.masked_fill(KNOWN == 2, 3), "known_tokens.*0.*3.*0.*2"),
        (KNOWN.masked_fill(KNOWN == 2, -2), "known_tokens.*-2"),
        (torch.zeros_like(KNOWN), "all.*-1"),
    ]:
        for sampler in (AnyOrderSampler(), SpeculativeAnyOrderSampler()):
            refuses(ValueError, words, decode, sampler, range(4), known_tokens=known)


@pytest.mark.parametrize("sampler", [AnyOrderSampler, SpeculativeAnyOrderSampler])
def test_other_models_are_refused(sampler):
    request: dict[str, Any] = dict(law=TokenLaw())
    with pytest.raises(ValueError, match="TabularMaskedModel.*SpeculativeMaskedSampler"):
        sampler()(TabularMaskedModel(TokenGrid(2, 2), 2), None, **request)
    with pytest.raises(ValueError, match="'raster'"):
        sampler()(TabularModel(TokenGrid(2, 2), 2), None, **request)
    with pytest.raises(ValueError, match="'raster'"):
        sampler()(nn.Linear(1, 1), None, **request)
    with pytest.raises(ValueError, match="guidance_until=3"):
        sampler()(MODEL, None, law=TokenLaw(guidance_scale=2.0, guidance_until=3))
    with pytest.raises(ValueError, match="3 slots.*8"):
        sampler(order=[0, 2, 1])(MODEL, None, **request)


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2]])
def test_orders_and_steps_that_do_not_fit_are_refused(order):
    for sampler in (AnyOrderSampler, SpeculativeAnyOrderSampler):
        refuses(ValueError, "order=.*random, halton", sampler, order=order)
    for steps in (1, 9):
        with pytest.raises(ValueError, match=f"steps={steps} .*2 to 8"):
            AnyOrderSampler(steps=steps)(MODEL, None, law=TokenLaw())


# -- planted bugs ----------------------------------------------------------------------------------------------------
