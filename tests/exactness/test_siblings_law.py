"""Kernel level: the exact one-slot law of every rule for several drafts, and the largest acceptance there can be."""

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from tests.helpers.sibling_laws import RULES, Given, one_slot_law, tuples
from visual_spec.samplers.raster import siblings
from visual_spec.samplers.raster.siblings import k_seq, recursive_rejection

COUNTS = [1, 2, 3, 4]


def laws(vocab_size: int, count: int = 40) -> tuple[Tensor, Tensor]:
    """Target and draft laws [N, V]: full, with forbidden tokens, uniform, equal, point, disjoint."""
    generator = torch.Generator().manual_seed(vocab_size)
    drawn = []
    for _ in range(2):
        scale = 3 * torch.rand(count, 1, generator=generator, dtype=torch.float64)
        logits = scale * torch.randn(count, vocab_size, generator=generator, dtype=torch.float64)
        forbidden = torch.rand(logits.shape, generator=generator) < 0.35
        forbidden[: count // 2] = False
        forbidden.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        drawn.append(logits.masked_fill(forbidden, -torch.inf).log_softmax(-1))
    target, draft = drawn
    uniform = torch.full((count, vocab_size), -math.log(vocab_size), dtype=torch.float64)
    point = torch.eye(vocab_size, dtype=torch.float64).log()
    half = torch.arange(vocab_size) < vocab_size // 2
    low = target[:vocab_size].masked_fill(half, -torch.inf).log_softmax(-1)
    high = draft[:vocab_size].masked_fill(~half, -torch.inf).log_softmax(-1)
    same = target[:vocab_size]
    return (
        torch.cat([target, target, same, same, point, point, low, point]),
        torch.cat([draft, uniform, point, same, same, point, high, point.roll(1, 0)]),
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("rule, replace", RULES.values(), ids=RULES.keys())
def test_every_rule_commits_the_target_law(rule, replace, count):
    target, draft = laws(4)
    law, acceptance = one_slot_law(rule, target, draft, count, replace)
    assert (law - target.exp()).abs().sum(1).max() / 2 < 1e-12
    equal = (target == draft).all(1)
    assert equal.sum() >= 8 and (acceptance[equal] - 1).abs().max() < 1e-12
    disjoint = (target.isneginf() | draft.isneginf()).all(1)
    assert disjoint.sum() >= 8 and acceptance[disjoint].max() < 1e-12


@pytest.mark.parametrize("vocab_size, count", [(2, 3), (3, 3), (5, 3), (6, 2)])
@pytest.mark.parametrize("rule, replace", RULES.values(), ids=RULES.keys())
def test_other_vocabularies_and_laws_that_run_out(rule, replace, vocab_size, count):
    target, draft = laws(vocab_size)
    law, _ = one_slot_law(rule, target, draft, count, replace)
    assert (law - target.exp()).abs().sum(1).max() / 2 < 1e-12


@pytest.mark.parametrize("count", COUNTS)
def test_deterministic_siblings_commit_the_target_law(count):
    """Point laws, as of a top-k tree, duplicates among them."""
    target, _ = laws(4)
    tokens = torch.cartesian_prod(*[torch.arange(4)] * count).view(-1, count)
    row = torch.arange(len(target) * len(tokens) * (count + 1))
    which, keep = row // (count + 1) % len(tokens), row % (count + 1)
    row = row // (len(tokens) * (count + 1))
    points = torch.eye(4, dtype=torch.float64).log()[tokens[which]]
    noise = Given(keep)
    slots = torch.full((len(row), 1), 7)
    _, left = recursive_rejection(target[row], tokens[which], points, noise, slots, 5)
    chosen = torch.cat([tokens, tokens[:, :1]], 1)[which].gather(1, keep[:, None])
    committed = torch.where(
        (keep < count)[:, None], torch.zeros_like(left).scatter(1, chosen, 1.0), left.exp()
    )
    law = torch.zeros(len(target), len(tokens), 4, dtype=torch.float64)
    law.index_put_((row, which), noise.weight[:, None] * committed, accumulate=True)
    assert (law - target.exp()[:, None]).abs().max() < 1e-12


def test_an_invalid_sibling_changes_nothing():
    target, draft = laws(4)
    rows = len(target)
    tokens = draft.argmax(1, keepdim=True).expand(-1, 3)
    slots, keep = torch.full((rows, 1), 7), torch.full((rows,), 3)
    expanded = draft[:, None].expand(-1, 3, -1)
    valid = torch.tensor([True, False, True]).expand(rows, -1)
    with_gap, alone = Given(keep), Given(keep.clamp(max=2))
    _, found = recursive_rejection(target, tokens, expanded, with_gap, slots, 5, valid)
    _, expected = recursive_rejection(target, tokens[:, :2], expanded[:, :2], alone, slots, 5)
    assert torch.equal(found, expected) and torch.equal(with_gap.weight, alone.weight)
    none = torch.full_like(expanded, -torch.inf)
    accepted, found = recursive_rejection(target, tokens, none, Given(keep), slots, 5)
    assert torch.equal(found, target) and (accepted == 3).all()


def test_catches_siblings_without_replacement_under_the_label_of_independent_ones():
    target, draft = laws(4)
    for count in (2, 3, 4):
        law, _ = one_slot_law(recursive_rejection, target, draft, count, False, wrong_label=True)
        assert (law - target.exp()).abs().sum(1).max() / 2 > 1e-2


def test_catches_a_residual_of_k_seq_without_its_division(monkeypatch):
    target, draft = laws(4)
    real = siblings._k_seq_rho
    monkeypatch.setattr(siblings, "_k_seq_rho", lambda *laws: (real(*laws)[0], real(*laws)[1] * 0.9))
    law, _ = one_slot_law(k_seq, target, draft, 3, True)
    assert (law - target.exp()).abs().sum(1).max() / 2 > 1e-3


# --------------------------------------------------------------------------------------------------- yardstick


def optimal_acceptance(target: Tensor, draft: Tensor, count: int, replace: bool) -> float:
    """The largest probability with which any exact rule can commit one of K siblings, by linear programming: how much
    of each sibling set goes to each of its tokens, of which a token takes at most its target mass."""
    optimize = pytest.importorskip("scipy.optimize")
    tokens, _, probability = tuples(draft[None], count, replace)
    sets: dict[frozenset[int], float] = defaultdict(float)
    for row, weight in zip(tokens.tolist(), probability[0].tolist(), strict=True):
        if weight > 0:
            sets[frozenset(token for token in row if draft[token] > -torch.inf)] += weight
    edges = [(number, token) for number, members in enumerate(sets) for token in sorted(members)]
    limits = torch.zeros(len(sets) + len(target), len(edges), dtype=torch.float64)
    for column, (number, token) in enumerate(edges):
        limits[number, column] = limits[len(sets) + token, column] = 1
    most = [*sets.values(), *target.exp().tolist()]
    solved = optimize.linprog([-1.0] * len(edges), A_ub=limits.numpy(), b_ub=most, method="highs")
    assert solved.status == 0
    return -solved.fun


@pytest.mark.parametrize("count", COUNTS)
def test_no_rule_beats_the_optimum_and_one_draft_reaches_it(count):
    target, draft = laws(4)
    best = {
        replace: torch.tensor(
            [optimal_acceptance(*pair, count, replace) for pair in zip(target, draft, strict=True)],
            dtype=torch.float64,
        )
        for replace in (True, False)
    }
    found = {
        name: (one_slot_law(rule, target, draft, count, replace)[1], best[replace])
        for name, (rule, replace) in RULES.items()
    }
    for acceptance, bound in found.values():
        assert (acceptance <= bound + 1e-9).all()
        if count == 1:
            assert (acceptance - bound).abs().max() < 1e-9
    share, bound = found["K-SEQ"]
    assert (share >= (1 - (1 - 1 / count) ** count) * bound - 1e-9).all()  # SpecTr's guarantee
    overlap = torch.minimum(target, draft).exp().sum(1)
    if count > 1:  # more siblings, more acceptance; the first laws leave no token out
        assert (share > overlap + 1e-3)[:20][overlap[:20] < 0.95].all()
