"""The drafted column sampler as an object: identity, traces, drafters, refusals. Its laws: tests/exactness."""

from typing import Any

import pytest
import torch

from tests.helpers.column_drafters import columns, condition, drafter_for
from tests.helpers.columns import LAW, LAWS, PATTERNS, POOR, decode, poor, tabular
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularColumnModel, TabularModel
from tests.helpers.tiny import seeded
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


def drafted(acceptance: str = "exact", num_drafts: int = 3, **options: Any) -> Any:
    return decode(DraftedColumnSampler(num_drafts, acceptance), drafter=POOR, **options)


# -- identity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_identical_mode_returns_the_autoregressive_tokens(law, pattern):
    model, rows = tabular(pattern), range(3)
    plain = decode(ColumnAutoregressiveSampler(), model, law, rows)
    for num_drafts in (1, 4):
        sampler = DraftedColumnSampler(num_drafts, "identical")
        found = decode(sampler, model, law, rows, drafter=poor(pattern))
        assert torch.equal(found.tokens, plain.tokens)
        assert found.trace.identical and found.trace.lossless


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("prompt_frames", [0, 4])
def test_an_eagle_drafter_changes_no_code_of_a_musicgen(prompt_frames, batch_size, guidance_scale):
    target = columns(prompt_frames)
    drafter, own = drafter_for(target), condition(prompt_frames)
    own = MusicCondition(
        own.features[:batch_size],
        own.mask[:batch_size],
        None if own.codes is None else own.codes[:batch_size],
    )
    law = TokenLaw(guidance_scale=guidance_scale, temperature=0.9, top_k=12)
    request: Any = dict(law=law, batch_size=batch_size)
    plain = ColumnAutoregressiveSampler()(target, own, generator=seeded(*range(batch_size)), **request)
    sampler = DraftedColumnSampler(acceptance="identical")
    found = sampler(target, own, drafter=drafter, generator=seeded(*range(batch_size)), **request)
    assert torch.equal(found.tokens, plain.tokens)


def test_a_musicgen_drafts_for_itself_without_a_refusal():
    target, own = columns(), condition()
    law = TokenLaw(guidance_scale=2.5)
    for acceptance in ("exact", "identical"):
        sampler = DraftedColumnSampler(2, acceptance)
        found = sampler(target, own, law=law, drafter=columns(), generator=seeded(1, 2), batch_size=2)
        # The prefill gives a column, each call three, rounding aside.
        assert found.trace.target_calls.tolist() == 2 * [1 + -(-(target.grid.width - 1) // 3)]


# -- what it gains -------------------------------------------------------------------------------------------------


def test_exact_drafting_from_text_beats_jacobi_where_columns_hang_on_each_other():
    """What a column is depends on the one before throughout, so what is drafted after a wrong one is of no use."""
    model = tabular(dependence=1.0)
    drafter = tabular(dependence=1.0, seed=8)
    drafter.logits = 0.7 * model.logits + 0.3 * drafter.logits
    rows = range(12)
    found = decode(DraftedColumnSampler(), model, rows=rows, drafter=drafter).trace.tokens_per_call.mean()
    jacobi = decode(ColumnJacobiSampler(4, "maximal", "exact"), model, rows=rows).trace.tokens_per_call.mean()
    assert found > 1.15 * jacobi


# -- a replacement that is not found --------------------------------------------------------------------------------


def watch_proposals(monkeypatch: Any) -> list[Any]:
    """What each call of a sampler with one attempt drafts: state before the call, steps that are fed, first laws."""
    seen: list[Any] = []
    propose, feed = DraftedColumnSampler.propose, TabularColumnModel.forward

    def watched(sampler, run, state):
        seen.append(dict(pending=state.pending.clone(), lengths=state.lengths.clone(), fed=state.fed.clone()))
        draft = propose(sampler, run, state)
        assert draft.label is not None
        seen[-1]["law"] = draft.label.laws[:, : run.view.codebooks]
        seen[-1]["refused"] = state.refused_law.clone()
        return draft

    def fed(model, state, tokens, steps):
        if model is POOR and seen:
            seen[-1].setdefault("steps", steps.clone())
        return feed(model, state, tokens, steps)

    monkeypatch.setattr(DraftedColumnSampler, "propose", watched)
    monkeypatch.setattr(TabularColumnModel, "forward", fed)
    monkeypatch.setattr(DraftedColumnSampler, "tries", 1)
    return seen


def test_a_pending_row_is_drafted_from_its_newest_column(monkeypatch):
    """The column that waits for its replacement was drawn from the same law in the call before."""
    calls = watch_proposals(monkeypatch)
    decode(DraftedColumnSampler(3), drafter=POOR, rows=range(12))
    waiting = again = 0
    for call in calls:
        newest = call["lengths"] - 1
        assert (call["steps"][:, 0] <= newest).all()
        for row in call["pending"].nonzero()[:, 0].tolist():
            assert torch.equal(call["law"][row], call["refused"][row])
            waiting += 1
            if call["fed"][row] == call["lengths"][row]:  # the call before committed nothing
                assert call["steps"][row, 0] == newest[row]
                again += 1
    assert waiting > again > 5


# -- refusals ------------------------------------------------------------------------------------------------------


def test_refuses_drafters_that_do_not_fit():
    sampler = DraftedColumnSampler()
    refuses(ValueError, "drafter=", decode, sampler)
    refuses(ValueError, "3 codebooks.*7.*4", decode, sampler, drafter=tabular("parallel"))
    shifted = tabular()
    shifted.valid = shifted.valid.flip(0)
    refuses(ValueError, "own pattern", decode, sampler, drafter=shifted)
    refuses(ValueError, "MusicGen.*TabularColumnModel", decode, sampler, drafter=drafter_for(columns()))
    with pytest.raises(ValueError, match="TabularModel"):
        flat: Any = TabularModel(TokenGrid(2, 2), 3)
        sampler(flat, None, law=LAW, drafter=POOR)


def test_names_a_drafter_whose_logits_define_no_law():
    broken = poor()
    broken.logits[..., 0] = torch.nan
    refuses(FloatingPointError, "drafter.*nan", decode, DraftedColumnSampler(), drafter=broken)
