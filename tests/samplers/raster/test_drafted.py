"""The chain sampler as an object: caches, raggedness, early stop, configuration, refusals. Its law: tests/exactness."""

import pytest
import torch

from tests.helpers.drafting import (
    CONDITION,
    MODEL,
    NEAR,
    captions,
    counting,
    decode,
    eagle_pair,
    law_after,
)
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.acceptance import AcceptanceRule
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster import drafted
from visual_spec.samplers.raster.drafted import DraftedSampler

LENGTH = 36


@pytest.mark.parametrize("drafter", ["tabular", "eagle"])
@pytest.mark.usefixtures("whole_batch")
def test_every_draft_carries_the_law_it_was_drawn_from(monkeypatch, drafter):
    """Labels recomputed from scratch, also after refusals: a label that is off would bias the output unnoticed."""
    law = TokenLaw(guidance_scale=2.0, top_k=6)
    model, network = (MODEL, NEAR) if drafter == "tabular" else eagle_pair()
    condition = CONDITION[:2] if drafter == "tabular" else captions(2)
    checked = 0
    real_propose = DraftedSampler.propose

    def propose(self, run, state):
        nonlocal checked
        chain = real_propose(self, run, state)
        assert chain.label is not None
        laws = chain.label.dense(chain.tokens)
        for row in range(2):
            length = int(state.lengths[row])
            if length < run.num_tokens and state.round % 4 == row:
                text = state.tokens[row, :length].tolist()
                for place in range(chain.tokens.shape[1]):
                    if chain.tokens[row, place] >= 0:
                        want = law_after(run.model, run.drafter, condition, law, text, length, row, 2)
                        assert (laws[row, place].exp() - want.exp()).abs().max() < 1e-9
                        checked += 1
                    text.append(int(chain.tokens[row, place]))
        return chain

    monkeypatch.setattr(DraftedSampler, "propose", propose)
    decode(DraftedSampler(3), model, network, condition, law=law, batch_size=2)
    assert checked > 20


# --------------------------------------------------------------------------------------------------- early stop


def test_stopping_early_on_the_cpu_spares_calls_and_columns_and_changes_nothing(monkeypatch):
    sampler = DraftedSampler(6, 0.3)
    model, drafter = counting(MODEL), counting(NEAR)
    stopped = decode(sampler, model, drafter)
    spared = len(drafter.calls), sum(slots.numel() for slots in model.calls)
    monkeypatch.setattr(drafted, "nobody", lambda going: False)
    whole = decode(sampler, model, drafter)
    assert torch.equal(stopped.tokens, whole.tokens)
    assert torch.equal(stopped.trace.commit_call, whole.trace.commit_call)
    assert spared[0] < len(drafter.calls) and spared[1] < sum(slots.numel() for slots in model.calls)


@pytest.mark.usefixtures("whole_batch")
def test_a_draft_below_the_bound_is_kept_and_the_last_of_its_row(monkeypatch):
    chains = []
    real_propose = DraftedSampler.propose

    def propose(self, run, state):
        chains.append((state.lengths.clone(), real_propose(self, run, state)))
        return chains[-1][1]

    monkeypatch.setattr(DraftedSampler, "propose", propose)
    decode(DraftedSampler(5, 0.25))
    stops = 0
    for lengths, chain in chains:
        for row in range(4):
            count = int((chain.tokens[row] >= 0).sum())
            assert (chain.tokens[row, :count] >= 0).all()
            if lengths[row] == LENGTH:
                assert count == 0
                continue
            assert 1 <= count <= LENGTH - lengths[row]
            law = chain.label.dense(chain.tokens)[row]
            at_draft = law[:count].gather(1, chain.tokens[row, :count, None])[:, 0].exp()
            assert (at_draft[:-1] >= 0.25).all()
            stops += int(at_draft[-1] < 0.25)
            assert law[count:].isneginf().all()
    assert stops > 10


# ---------------------------------------------------------------------------------------------- relaxed rules


def test_a_relaxed_rule_is_used_and_its_divergence_measured():
    """One step on many rows: the meter against the sum over tokens of (draft * accept - target)+, in float64."""
    rows, grid = 20_000, TokenGrid(1, 2)
    model, drafter = TabularModel(grid, 3), TabularModel(grid, 3, seed=1)
    rule = AcceptanceRule(lambda target, law, drafts: torch.full_like(law[..., 0], 0.9), lossless=False)
    sampler = DraftedSampler(1)
    run = sampler.begin(model, None, TokenLaw(), torch.arange(rows), drafter=drafter)
    run.rule = rule
    state = sampler.prepare(run)
    sampler.step(run, state)
    assert state.meter is not None and (state.meter.tested == 1).all()
    first = model.logits[0, 0, 0].softmax(-1)
    target, draft = (network.logits[0, 1].softmax(-1) for network in (model, drafter))  # [3 first tokens, 3]
    moved = (0.9 * draft - target).clamp(min=0).sum(-1)
    assert state.meter.mean() == pytest.approx(float(first @ moved), rel=0.03)
    left = (target - draft).clamp(min=0)
    expected = 0.9 * draft + 0.1 * left / left.sum(-1, keepdim=True)
    observed = torch.bincount(state.tokens[:, 0] * 3 + state.tokens[:, 1], minlength=9).view(3, 3) / rows
    assert (observed - first[:, None] * expected).abs().max() < 0.012


def test_a_slot_without_a_draft_is_not_counted_as_tested():
    """With an equal drafter and a rule that keeps everything, the tested slots are those with a draft."""
    rule = AcceptanceRule(lambda target, law, drafts: torch.ones_like(law[..., 0]), lossless=False)
    for stop_below in (0.0, 0.15, 1.0):
        sampler = DraftedSampler(3, stop_below)
        run = sampler.begin(MODEL, CONDITION, TokenLaw(), torch.arange(4), drafter=MODEL)
        run.rule = rule
        state = sampler.prepare(run)
        drafted = torch.zeros(4, dtype=torch.long)
        real = sampler.propose

        def propose(run, state, real=real, drafted=drafted):
            draft = real(run, state)
            drafted += (draft.tokens >= 0).sum(1)
            return draft

        object.__setattr__(sampler, "propose", propose)
        for _ in range(3):
            sampler.step(run, state)
        assert state.meter is not None and state.meter.tested.tolist() == drafted.tolist()
        assert state.lengths.tolist() == (4 + drafted).tolist()
        if stop_below == 1.0:
            assert drafted.tolist() == 4 * [3]
        elif stop_below:
            assert len(set(drafted.tolist())) > 1


def test_a_draft_of_exactly_the_bounds_probability_does_not_stop():
    """A greedy law gives its token probability 1, which is not below 1."""
    trace = decode(DraftedSampler(4, 1.0), MODEL, MODEL, law=TokenLaw(temperature=0.0)).trace
    assert trace.target_calls.tolist() == 4 * [1 + 35 // 5]


# ------------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("size", [(1, 1), (1, 2)])
def test_the_smallest_grids(size):
    model = TabularModel(TokenGrid(*size), 5)
    result = decode(DraftedSampler(4), model, model, None, batch_size=2)
    assert result.tokens.shape == (2, size[1])
    assert result.trace.target_calls.tolist() == [size[1]] * 2


# ----------------------------------------------------------------------------------------------------- refusals


def test_refuses_to_decode_without_a_drafter():
    refuses(ValueError, "DraftedSampler.*1 x 6 x 6.*12", decode, DraftedSampler(), MODEL, None)


@pytest.mark.parametrize(
    "grid, vocab_size", [(TokenGrid(6, 6), 11), (TokenGrid(6, 5), 12), (TokenGrid(3, 6, 2), 12)]
)
def test_refuses_a_drafter_of_other_tokens_and_says_what_fits(grid, vocab_size):
    other = TabularModel(grid, vocab_size, order=1)
    refuses(ValueError, f"{vocab_size}.*1 x 6 x 6.*12", decode, DraftedSampler(), MODEL, other)


def test_refuses_a_feature_drafter_of_another_target():
    model, _ = eagle_pair()
    from visual_spec.models.drafters.eagle import EagleDrafter

    other = EagleDrafter(vocab_size=8, dim=16, num_heads=2, grid_size=5)
    refuses(ValueError, "dim=16.*dim=32", decode, DraftedSampler(), model, other, captions(2), batch_size=2)


def test_a_drafter_with_its_own_condition():
    with pytest.raises(ValueError, match=r"torch\.int64"):  # the model's does not fit: 4 rows
        decode(DraftedSampler(), drafter_condition=torch.tensor([0]))
    plain = decode(DraftedSampler())
    same = decode(DraftedSampler(), drafter_condition=CONDITION.clone())
    other = decode(DraftedSampler(), drafter_condition=1 - CONDITION.clamp(max=1))
    assert torch.equal(plain.tokens, same.tokens)
    assert not torch.equal(plain.trace.commit_call, other.trace.commit_call)


def test_says_when_it_is_the_drafter_whose_logits_define_no_law():
    broken = counting(NEAR)
    broken.logits = broken.logits.clone()
    broken.logits[:, 9] = torch.nan
    refuses(FloatingPointError, "slot 9.*nan", decode, DraftedSampler(), MODEL, broken)
    refuses(FloatingPointError, "logits", decode, DraftedSampler(), broken, NEAR)
