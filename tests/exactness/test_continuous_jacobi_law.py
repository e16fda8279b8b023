"""Jacobi decoding of continuous tokens where drafts are redrawn for several calls before one of their tests counts.

Six tokens, each shifted by those before it, in windows of four and six slots. Sequences are compared with chains that
are written out (`straight_chain`): slot by slot, and neighbour by neighbour. Three broken samplers fail the same test.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.mixtures import MaskedMixtureModel, Mixture, MixtureModel, far_apart, straight_sequences
from visual_spec.samplers.continuous.jacobi import ContinuousJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, CounterNoise

pytestmark = pytest.mark.usefixtures("keys_in_bulk")

LENGTH, SLOPE, COUNT = 6, -0.6, 2500
LINE = [
    Mixture([0.5, 0.5], [-1.0, 1.0], [0.25, 0.25]),
    Mixture([0.4, 0.6], [-0.5, 0.4], [0.25, 0.35]),
    Mixture([1.0], [0.2], [0.4]),
] * 2
PLANE = [
    Mixture([0.5, 0.5], [[-0.9, 0.3], [0.8, -0.2]], [0.3, 0.35]),
    Mixture([1.0], [[0.2, -0.1]], [0.4]),
] * 3
# As published, a diffusion head learns its widths, so those of two chains differ. Euler steps add no noise.
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diffusion": (dict(share=0.5, sway=0.4), dict(head_steps=20, final_noise=0.1)),
    "diffusion, equal widths": ({}, dict(head_steps=20, eta=1.0, final_noise=0.1)),
    "flow, noise": (dict(flow=True), dict(head_steps=20, eta=1.0, final_noise=0.1)),
    "flow, Euler": (dict(flow=True), dict(head_steps=10, final_noise=0.25)),
}


class MaskedLine(MaskedMixtureModel):
    """The same law of six tokens, for a model that scores each context as a row of its own."""

    def __init__(self, mixtures: Any, **settings: Any) -> None:
        MixtureModel.__init__(self, mixtures, **settings)

    def __call__(self, state: Any, tokens: Tensor, known: Tensor, room: int | None = None) -> Tensor:  # pyright: ignore
        assert len(state.tokens) == len(tokens)
        shift = self.slope * torch.where(known[..., None], tokens, 0.0).sum(1, keepdim=True)
        shift = shift.expand_as(tokens)
        return self._z(shift, torch.arange(LENGTH).expand(len(tokens), -1))


def distance(tokens: Tensor, expected: Tensor) -> float:
    """Above 1, sequences [N, 6, d] and [M, 6, d] differ: the chance of that under one law is about one in a thousand.

    The largest of the distances of slots, of pairs of neighbours along directions, and of their correlations.
    """
    sides = tokens, expected
    parts = [[side[:, slot] for side in sides] for slot in range(LENGTH)]
    parts += [[side[:, slot : slot + 2].flatten(1) for side in sides] for slot in range(LENGTH - 1)]
    chance = 1e-3 / (2 * LENGTH - 1)
    found = [far_apart(one, other, chance) for one, other in parts]
    for slot in range(LENGTH - 1):  # Fisher's transform, whose spread is near 1 / sqrt(N) for these laws
        one, other = (torch.corrcoef(side[:, slot : slot + 2, 0].T)[0, 1].atanh() for side in sides)
        spread = math.sqrt(1 / len(tokens) + 1 / len(expected))
        found.append(float((one - other).abs()) / (5.0 * spread))
    return max(found)


def drawn(sampler: Any, model: Any, count: int = COUNT) -> Any:
    generator = torch.Generator().manual_seed(2)
    return sampler(model, None, law=TokenLaw(), generator=generator, batch_size=count)


def redrawn(trace: Any, window: int) -> Tensor:
    """How often the draft of each slot was redrawn before its test counted, long [N, 6]; -1: it had no draft."""
    calls = trace.commit_call
    # A slot is drafted for the first time by the call that begins fewer than `window` slots before it.
    begins = torch.stack([(calls < call).sum(1) for call in range(LENGTH + 1)], 1)  # [N, calls]
    reached = begins[:, None] + window > torch.arange(LENGTH)[:, None]  # [N, 6, calls]
    reached[..., 0] = False  # the first call draws one slot, and drafts none
    return calls - reached.to(torch.uint8).argmax(2) - 1


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize(("laws", "window"), [(LINE, 6), (PLANE, 4)], ids=["line", "plane"])
@pytest.mark.parametrize("head", HEADS)
def test_drafts_that_were_redrawn_many_times_have_the_law(head, laws, window):
    of_head, settings = HEADS[head]
    model = MixtureModel(laws, slope=SLOPE, **of_head)
    found = drawn(ContinuousJacobiSampler(window, **settings), model)
    assert distance(found.tokens, straight_sequences(model, 4 * COUNT, 3, **settings)) < 1
    often = redrawn(found.trace, window)[:, 4:]
    assert (often >= 2).float().mean() > 0.2 and int(often.max()) == window // 2
    assert found.trace.beside(found.trace.law_settings).lossless
    assert 0.1 < found.trace.acceptance < 0.95


def test_a_model_that_sees_both_ways_has_it_too():
    of_head, settings = HEADS["diffusion"]
    model = MaskedLine(LINE, slope=SLOPE, **of_head)
    sampler = ContinuousJacobiSampler(4, order="raster", **settings)
    found = drawn(sampler, model, 2000)
    assert distance(found.tokens, straight_sequences(model, 4 * COUNT, 3, **settings)) < 1
    assert (redrawn(found.trace, 4)[:, 4:] >= 2).float().mean() > 0.2


# -- planted bugs -----------------------------------------------------------------------------------------------------


class StaleLabel(ContinuousJacobiSampler):
    """Redraws the points of a draft, and keeps the laws that its points had a call before."""

    kept: tuple[str, ...] = ("mean", "sigma")

    def step(self, run: Any, state: Any) -> None:
        before, drafted, lengths = state.log, state.drafted, state.lengths.clone()
        super().step(run, state)
        columns = (state.lengths - lengths)[:, None] + torch.arange(drafted.shape[1])
        at = columns.clamp_max(drafted.shape[1] - 1)
        had = (drafted.gather(1, at) & (columns < drafted.shape[1]))[..., None, None]
        for name in self.kept:
            setattr(state.log, name, torch.where(had, getattr(before.at(at), name), getattr(state.log, name)))


class OldPoints(StaleLabel):
    """Redraws the laws of a draft, and keeps the points that it had a call before."""

    kept = ("points",)


def with_noise_of_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of a draft is decided by the noise that the draft was drawn with."""
    uniform = CounterNoise.uniform

    def tied(self: Any, slots: Tensor, stream: int, round: Any, dtype: Any = torch.float32) -> Tensor:
        if stream == ACCEPT:
            return torch.special.ndtr(self.normal(slots, 1, DRAFT, round, dtype)[..., 0])
        return uniform(self, slots, stream, round, dtype)

    monkeypatch.setattr(CounterNoise, "uniform", tied)


# The steps of the Euler head are not drawn, so noise of the draft breaks the test of its first points only: too little.
@pytest.mark.fast_sets(3)
@pytest.mark.parametrize(
    ("bug", "head"),
    [
        *product(("stale label", "old points"), ("diffusion", "flow, Euler")),
        ("noise of the draft", "diffusion"),
    ],
)
def test_broken_samplers_fail_the_same_test(bug, head, monkeypatch):
    of_head, settings = HEADS[head]
    model = MixtureModel(LINE, slope=SLOPE, **of_head)
    kinds = {"stale label": StaleLabel, "old points": OldPoints}
    if bug not in kinds:
        with_noise_of_the_draft(monkeypatch)
    broken = kinds.get(bug, ContinuousJacobiSampler)(6, **settings)
    assert distance(drawn(broken, model).tokens, straight_sequences(model, 4 * COUNT, 3, **settings)) > 1
