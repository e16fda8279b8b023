"""Kernel level: the exact one-slot law of every acceptance rule, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.relaxed_rules import pairs
from visual_spec.samplers.core.acceptance import IDENTICAL, accepted_prefix, exact_acceptance, residual
from visual_spec.samplers.core.drafts import Draft
from visual_spec.samplers.core.noise import TOKEN, CounterNoise
from visual_spec.samplers.core.verification import verify_laws


def one_slot_law(target: Tensor, draft: Tensor) -> Tensor:
    """Law of the committed token, summed over every draft that the draft law can give: [N, V]."""
    vocab_size = target.shape[-1]
    law = torch.zeros_like(target)
    replaced = residual(target, draft).exp()
    for token in range(vocab_size):
        drafts = torch.full(target.shape[:2], token)
        probability = draft[..., token].exp()
        keep = exact_acceptance(target, draft, drafts)
        keep = torch.where(probability > 0, keep, torch.zeros_like(keep))  # a token that is never drafted
        law[..., token] += probability * keep
        law += (probability * (1 - keep))[..., None] * replaced
    return law[:, 0]


@pytest.mark.parametrize("vocab_size", [2, 3, 7, 63])
def test_exact_acceptance_with_its_residual_gives_the_target_law(vocab_size):
    target, draft = pairs(vocab_size)
    assert (one_slot_law(target, draft) - target[:, 0].exp()).abs().max() < 1e-12


@pytest.mark.parametrize("vocab_size", [2, 7])
def test_keep_or_replace_as_a_redraft_follows_the_target_jointly_with_the_overlap(vocab_size):
    """Maximal coupling: the redraft has the target law, and agrees with the draft as often as any coupling can."""
    target, draft = pairs(vocab_size)
    agreement = torch.zeros(len(target), dtype=torch.float64)
    replaced = residual(target, draft).exp()[:, 0]
    for token in range(vocab_size):
        probability = draft[:, 0, token].exp()
        keep = exact_acceptance(target, draft, torch.full((len(target), 1), token))[:, 0].nan_to_num()
        agreement += probability * (keep + (1 - keep) * replaced[:, token])
    overlap = torch.minimum(target.exp(), draft.exp()).sum(-1)[:, 0]
    assert (agreement - overlap).abs().max() < 1e-12


def test_residual_is_a_law_outside_the_draft_surplus():
    target, draft = pairs(7)
    law = residual(target, draft)
    assert (law.exp().sum(-1) - 1).abs().max() < 1e-12
    different = (target.exp() - draft.exp()).clamp(min=0).sum(-1) > 0
    surplus = (draft.exp() >= target.exp()) & different[..., None]
    assert law[surplus].isneginf().all()


def test_residual_without_a_draft_and_without_a_difference_is_the_target():
    target, _ = pairs(7)
    torch.testing.assert_close(
        residual(target, torch.full_like(target, -torch.inf)), target, atol=1e-14, rtol=0
    )
    assert torch.equal(residual(target, target), target)


def test_point_draft_is_kept_with_its_target_probability_and_never_drawn_again():
    target = torch.tensor([[[0.2, 0.5, 0.3]]], dtype=torch.float64).log()
    point = torch.tensor([[[-torch.inf, 0.0, -torch.inf]]], dtype=torch.float64)
    assert exact_acceptance(target, point, torch.tensor([[1]])).item() == pytest.approx(0.5, abs=1e-15)
    expected = torch.tensor([0.4, 0.0, 0.6], dtype=torch.float64)
    torch.testing.assert_close(residual(target, point).exp()[0, 0], expected)


def test_float32_laws_keep_their_dtype():
    target, draft = (law.float() for law in pairs(7))
    assert residual(target, draft).dtype == torch.float32
    assert (
        exact_acceptance(target, draft, torch.zeros(len(target), 1, dtype=torch.long)).dtype == torch.float32
    )


@pytest.mark.parametrize("vocab_size", [2, 7])
def test_identical_acceptance_commits_what_the_slots_own_noise_draws_whatever_the_draft(vocab_size):
    """Every draft in turn, at one slot: it is kept where it is that token, and the token stands in either case."""
    drafts = F.pad(torch.arange(vocab_size)[:, None], (0, 1), value=-1)  # [B, 2], the last position has none
    noise = CounterNoise(torch.full((vocab_size,), 5), "cpu")  # the same sample in every row
    slots = torch.tensor([[3, 4]]).expand(vocab_size, -1)
    target = torch.randn(1, 2, vocab_size, dtype=torch.float64).log_softmax(-1).expand(vocab_size, -1, -1)
    drawn = noise.categorical(target, slots, TOKEN)
    verdict = verify_laws(target, noise, slots, Draft(drafts, None, "all"), rule=IDENTICAL, round=1)
    assert torch.equal(verdict.tokens, drawn)
    assert torch.equal(verdict.kept, (drafts[:, 0] == drawn[:, 0]).long()) and verdict.kept.sum() == 1


def test_accepted_prefix_counts_up_to_the_first_refusal():
    bits = torch.cartesian_prod(*[torch.tensor([False, True])] * 4)
    expected = [next((i for i, bit in enumerate(row) if not bit), 4) for row in bits.tolist()]
    assert accepted_prefix(bits).tolist() == expected
    assert accepted_prefix(torch.zeros(3, 0, dtype=torch.bool)).tolist() == [0, 0, 0]
