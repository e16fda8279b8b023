"""Drawing siblings, and the addresses of their noise. What the rules commit: tests/exactness/test_siblings_law.py."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.samplers.conftest import Operations
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise
from visual_spec.samplers.raster.siblings import (
    k_seq,
    recursive_rejection,
    sibling_stream,
    with_replacement,
    without,
    without_replacement,
)

LAW = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()


def noise(rows: int, seed: int = 0) -> CounterNoise:
    generator = torch.Generator().manual_seed(seed)
    return CounterNoise(torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator), "cpu")


def slots(rows: int, slot: int = 3) -> Tensor:
    return torch.full((rows, 1), slot)


def order_law(law: Tensor, count: int, replace: bool) -> Tensor:
    """Probability of every ordered draw of `count` tokens, by the definition: [V ** count]."""
    probability = []
    for drawn in itertools.product(range(len(law)), repeat=count):
        weight, left = 1.0, law.exp().tolist()
        for token in drawn:
            weight *= left[token] / math.fsum(left)
            if not replace:
                left[token] = 0.0
        probability.append(weight)
    return torch.tensor(probability, dtype=torch.float64)


def p_value(observed: Tensor, law: Tensor) -> float:
    """Chi-square test over the outcomes that can happen."""
    expected = law * observed.sum()
    assert (observed[expected == 0] == 0).all()
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert expected.min() > 5
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


@pytest.mark.parametrize("draw, replace", [(with_replacement, True), (without_replacement, False)])
def test_siblings_come_in_the_order_and_with_the_laws_they_claim(draw, replace):
    rows, count = 200_000, 3
    law = LAW.float().expand(rows, -1)
    tokens, laws = draw(law, count, noise(rows), slots(rows), 1)
    assert tokens.shape == (rows, count) and laws.shape == (rows, count, 4)
    observed = torch.bincount(tokens @ torch.tensor([16, 4, 1]), minlength=64).double()
    assert p_value(observed, order_law(LAW, count, replace)) > 1e-4
    if not replace:  # the test tells the two ways of drawing apart
        assert p_value(observed, order_law(LAW, count, True)) < 1e-4

    # The labels, against the definition, one draw at a time.
    for row in range(200):
        left = LAW.exp().clone()
        for sibling, token in enumerate(tokens[row].tolist()):
            torch.testing.assert_close(
                laws[row, sibling].exp().double(), left / left.sum(), atol=1e-6, rtol=1e-5
            )
            if not replace:
                left[token] = 0.0


def test_the_first_sibling_is_the_draft_that_would_be_drawn_alone():
    law = torch.randn(500, 33, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    alone = noise(500).categorical(law[:, None], slots(500), DRAFT, 4)
    for draw in (with_replacement, without_replacement):
        assert torch.equal(draw(law, 3, noise(500), slots(500), 4)[0][:, :1], alone)


def test_a_law_that_runs_out_leaves_no_draft():
    law = torch.tensor([[0.25, 0.75, 0, 0], [0, 0, 1, 0]], dtype=torch.float64).log()
    tokens, laws = without_replacement(law, 4, noise(2), slots(2), 0)
    assert sorted(tokens[0, :2].tolist()) == [0, 1] and tokens[1, 0] == 2
    assert not laws.isnan().any()
    assert (laws > -torch.inf).any(-1).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert laws[0, 1].exp().sum() == 1 and laws[0, 1].max() == 0
    accepted, left = recursive_rejection(
        law.flip(1), tokens.clamp(min=0), torch.full_like(laws, -torch.inf), noise(2), slots(2), 0
    )
    assert accepted.tolist() == [4, 4] and torch.equal(left, law.flip(1))


def test_without_keeps_precision_where_nearly_all_mass_goes():
    law = torch.tensor([[0.0, -30.0, -31.0, -torch.inf]])
    left = without(law, torch.tensor([[0]]))
    expected = torch.tensor([[-torch.inf, -30.0, -31.0, -torch.inf]], dtype=torch.float64).log_softmax(-1)
    torch.testing.assert_close(left.double(), expected, atol=1e-6, rtol=0)
    assert without(left, torch.tensor([[1, 2]])).isneginf().all()


def test_no_two_siblings_share_bits():
    """All streams of up to 9 siblings, scalars and rows: every number is another one."""
    streams = [
        sibling_stream(stream, k) for stream in (TOKEN, DRAFT, ACCEPT, RESIDUAL, 4, 5) for k in range(9)
    ]
    assert len(set(streams)) == len(streams) and max(streams) < 2**32
    assert [sibling_stream(stream, 0) for stream in (TOKEN, DRAFT, ACCEPT, RESIDUAL)] == [0, 1, 2, 3]
    source = noise(1)
    numbers = [source.uniform(slots(1), stream, 2, torch.float64).flatten() for stream in streams]
    numbers += [source.gumbel(slots(1), 8, stream, 2, torch.float64).flatten() for stream in streams]
    assert len(torch.cat(numbers).unique()) == len(streams) * 9


def test_siblings_are_tested_with_independent_numbers():
    """Point drafts of probability 1/2, 1/2 and 1/2 of what is left: kept 1/2, 1/4 and 1/8 of the time."""
    rows = 100_000
    law = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(rows, -1)
    drafts = torch.tensor([0, 1, 2]).expand(rows, -1)
    points = torch.eye(4)[:3].log().expand(rows, -1, -1)
    accepted, left = recursive_rejection(law, drafts, points, noise(rows), slots(rows), 1)
    assert (
        p_value(
            torch.bincount(accepted, minlength=4).double(), torch.tensor([0.5, 0.25, 0.125, 0.125]).double()
        )
        > 1e-4
    )
    assert (left[accepted == 3].exp() == torch.tensor([0.0, 0, 0, 1])).all()


def test_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(0)
    target, draft = (2 * torch.randn(2, 6, 20, generator=generator)).log_softmax(-1)
    keys = noise(6).keys
    where = torch.tensor([[1], [5], [2], [2], [9], [0]])

    def run(rows: slice) -> list[Tensor]:
        source = CounterNoise(keys[rows], "cpu")
        tokens, laws = without_replacement(draft[rows], 3, source, where[rows], 2)
        independent, _ = with_replacement(draft[rows], 3, source, where[rows], 2)
        return [
            tokens,
            independent,
            *recursive_rejection(target[rows], tokens, laws, source, where[rows], 2),
            *k_seq(target[rows], independent, draft[rows], source, where[rows], 2),
        ]

    for together, alone in zip(
        run(slice(0, 6)), zip(*[run(slice(row, row + 1)) for row in range(6)], strict=True), strict=True
    ):
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_laws_keep_their_dtype_and_define_laws(dtype):
    generator = torch.Generator().manual_seed(0)
    target, draft = (3 * torch.randn(2, 50, 300, generator=generator, dtype=dtype)).log_softmax(-1)
    tokens, laws = without_replacement(draft, 4, noise(50), slots(50), 0)
    assert all(len(row.unique()) == 4 for row in tokens)
    for left in (
        recursive_rejection(target, tokens, laws, noise(50), slots(50), 0)[1],
        k_seq(target, tokens, draft, noise(50), slots(50), 0)[1],
    ):
        assert left.dtype == dtype
        torch.testing.assert_close(left.exp().sum(-1), torch.ones(50, dtype=dtype))


def test_nothing_asks_the_host_about_a_tensor():
    law = LAW.expand(5, -1)
    with Operations() as operations:
        tokens, laws = without_replacement(law, 3, noise(5), slots(5), 0)
        recursive_rejection(law, tokens, laws, noise(5), slots(5), 0, torch.ones(5, 3, dtype=torch.bool))
        tokens, _ = with_replacement(law, 3, noise(5), slots(5), 0)
        k_seq(law, tokens, law, noise(5), slots(5), 0)
    assert not operations.that_ask_the_host()
