"""Drafts from earlier frames: lossless by enumeration, the plain tokens in identical mode, and the bug that is not."""

import pytest
import torch

from tests.exactness.enumeration import PLAIN, Enumerator
from tests.exactness.regions import total_variation
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import Label, copied_slots
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

COMBINATIONS = [("gumbel", "identical"), *((name, "exact") for name in ("gumbel", "independent", "maximal"))]
FRAME_DRAFTS = ("previous_frame", "moved_frame", "panned_frame")


def distance(sampler: SpeculativeJacobiSampler, model: TabularModel) -> float:
    found = Enumerator(sampler, model, PLAIN).run()
    return float(total_variation(found.law, model.law_of_sequences(PLAIN, guided=False)))


@pytest.mark.parametrize("initial_draft", FRAME_DRAFTS)
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("window", [2, 3])
def test_two_frames_are_lossless(window, coupling, acceptance, initial_draft):
    """Slots 2 and 3 copy slots 0 and 1; a window of 3 crosses the border of the frames."""
    model = TabularModel(TokenGrid(1, 2, 2), 3, seed=2)
    assert distance(SpeculativeJacobiSampler(window, coupling, acceptance, initial_draft), model) < 1e-10


@pytest.mark.parametrize("initial_draft", ["moved_frame", "panned_frame"])
@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("grid", [TokenGrid(1, 1, 5), TokenGrid(1, 2, 3)], ids=["1 x 1 x 5", "1 x 2 x 3"])
def test_moved_frames_are_lossless_where_motion_is_seen(grid, coupling, acceptance, initial_draft):
    """With two tokens a frame and more than two frames, blocks are matched, and lags chosen."""
    model = TabularModel(grid, 2, seed=3)
    assert distance(SpeculativeJacobiSampler(3, coupling, acceptance, initial_draft), model) < 1e-10


class CreditsStoredLaw(SpeculativeJacobiSampler):
    """The likely bug: a copied token is labelled with the law that the token was once drawn from."""

    def redraft(self, run, state, laws, advance, width, drawn=None):
        super().redraft(run, state, laws, advance, width, drawn)
        assert laws is not None and state.label is not None
        slots = state.next_slots(state.label.rows.shape[1])
        newest = (state.lengths - advance + width - 1)[:, None]
        first = (state.lengths - advance)[:, None]  # the slot that row 0 of `laws` predicts
        source = copied_slots("previous_frame", slots, newest, run.model.grid)
        rows = torch.where(state.label.rows < 0, (source - first).clamp(0, width - 1), state.label.rows)
        state.label = Label(laws, rows, state.label.allowed)


@pytest.mark.parametrize("coupling", ["gumbel", "independent", "maximal"])
def test_crediting_the_stored_law_is_biased(coupling):
    model = TabularModel(TokenGrid(1, 1, 4), 3, seed=2)
    settings = (2, coupling, "exact", "previous_frame")
    assert distance(SpeculativeJacobiSampler(*settings), model) < 1e-10
    assert distance(CreditsStoredLaw(*settings), model) > 0.01


MODEL = TabularModel(TokenGrid(2, 3, 6), 11, order=2, conditions=5, dependence=0.3)
CONDITION = torch.tensor([3, 0, 4, 1, 2])


@pytest.mark.parametrize("initial_draft", FRAME_DRAFTS)
@pytest.mark.parametrize("window", [1, 2, 8, 64])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_identical_mode_returns_the_autoregressive_tokens(batch_size, window, initial_draft):
    law = TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=7)

    def decode(sampler):
        generators = [torch.Generator().manual_seed(100 + row) for row in range(batch_size)]
        condition = CONDITION[:batch_size]
        return sampler(MODEL, condition, law=law, generator=generators, batch_size=batch_size).tokens

    sampler = SpeculativeJacobiSampler(window, "gumbel", "identical", initial_draft)
    assert torch.equal(decode(sampler), decode(AutoregressiveSampler()))
