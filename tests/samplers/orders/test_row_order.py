"""Row orders against a simulation written from their definition, one row and one slot at a time."""

import itertools
import random

import pytest
import torch

from tests.helpers.row_simulation import Simulation
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.orders.row_order import RowOrder

SHAPES = [(1, 4), (3, 4), (5, 3), (4, 1)]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("windows", [None, 1, 3])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_plan_is_what_the_definition_says(rows, width, windows, drafts):
    for lead, start in itertools.product(sorted({1, 2, width}), (1, 3)):
        order = RowOrder.over(TokenGrid(rows, width), lead, windows=windows, drafts=drafts, start_at=start)
        assert order.lead <= width and order.columns == order.windows * (drafts + 1)
        generator = random.Random(lead)
        samples = [Simulation(order) for _ in range(2)]  # ragged: each commits as many as it likes
        lengths, row = order.start(2, torch.device("cpu"))
        num_tokens = rows * width
        drawn = [{0} for _ in samples]
        for _ in range(2 * num_tokens):
            if order.done(lengths).all():
                break
            plan = order.plan(lengths, row)
            count = torch.zeros_like(row)
            for b, sample in enumerate(samples):
                assert sample.lengths == lengths[b].tolist()
                assert sorted(r for r in row[b].tolist() if r < rows) == sample.open
                want = sample.call()
                counts = {}
                for a, r in enumerate(row[b].tolist()):
                    columns = range(a * (drafts + 1), (a + 1) * (drafts + 1))
                    got = []
                    for w in columns:
                        assert int(plan.scratch[w]) == num_tokens + w
                        # Idle: it feeds and predicts its own scratch place.
                        if plan.slots[b, w] >= num_tokens:
                            assert plan.slots[b, w] == plan.predicted[b, w] == plan.scratch[w]
                            continue
                        predicted = int(plan.predicted[b, w])
                        assert predicted < num_tokens or predicted == plan.scratch[w]
                        seen = frozenset(plan.seen[b, w].nonzero()[:, 0].tolist())
                        got.append(
                            (
                                int(plan.sources[b, w]),
                                int(plan.slots[b, w]),
                                predicted if predicted < num_tokens else -1,
                                seen,
                            )
                        )
                    assert got == want.get(r, []), (order, sample.lengths, r)
                    scored = sum(column[2] >= 0 for column in got)
                    assert scored == plan.scored[b, a]
                    if scored:
                        counts[r] = int(count[b, a].fill_(generator.randint(1, scored)))
                        new = [column[2] for column in got[: counts[r]]]
                        assert not drawn[b] & set(new)
                        drawn[b].update(new)
                        assert plan.length[b, a] == sample.lengths[r]
                        assert plan.above[b, a] == (sample.lengths[r - 1] if r else width)
                # All that anyone sees is fed by now with its own token, or in this call, or is a draft of one's own.
                now = {slot for fed in want.values() for source, slot, _, _ in fed if source == slot}
                for fed in want.values():
                    for _, _, _, seen in fed:
                        assert all(sample.cached.get(slot) or slot in now for slot in seen)
                sample.commit(counts, want)
            lengths, row = order.advance(lengths, row, plan, count)
        assert order.done(lengths).all() and (lengths == width).all()
        assert all(slots == set(range(num_tokens)) for slots in drawn)
        # What is complete stays as it is.
        plan = order.plan(lengths, row)
        assert (plan.slots >= num_tokens).all() and (plan.scored == 0).all()
        again, _ = order.advance(lengths, row, plan, torch.zeros_like(row))
        assert torch.equal(again, lengths)


@pytest.mark.parametrize("lead", [1, 2, 3, 4, 7, 8, 20])
@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (6, 8)])
def test_rows_that_advance_together_take_the_calls_of_the_formula(rows, width, lead):
    order = RowOrder.over(TokenGrid(rows, width), lead)
    lead = min(lead, width)
    lengths, row = order.start(1, torch.device("cpu"))
    calls, drawn_at = 1, {0: 0}
    while not order.done(lengths).all():
        plan = order.plan(lengths, row)
        for slot in plan.predicted[0].tolist():
            if slot < rows * width:
                drawn_at[slot] = calls
        lengths, row = order.advance(lengths, row, plan, plan.scored)
        calls += 1
    assert calls == order.calls == width + (rows - 1) * lead
    # Row r starts lead calls after row r - 1, and never waits for a window.
    assert drawn_at == {r * width + c: r * lead + c for r in range(rows) for c in range(width)}


def test_published_counts():
    # 90 rows of 91 tokens at s = 7, and 40 x 64 tokens on diagonals of width 1 and 2.
    assert RowOrder.over(TokenGrid(90, 91), 7).calls == 714
    assert RowOrder.over(TokenGrid(40, 64), 1).calls == 103
    assert RowOrder.over(TokenGrid(40, 64), 2).calls == 142


def test_frames_are_a_chain_of_rows():
    order = RowOrder.over(TokenGrid(3, 4, frames=2), 2)
    assert order.rows == 6 and order.calls == 4 + 5 * 2
