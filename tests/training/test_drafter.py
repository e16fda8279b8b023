"""Training a drafter on a tiny target: it learns, resumes to the same weights, and says what it reached."""

from typing import Any, cast

import pytest
import torch

from tests.helpers.drafter_training import SIDE, TINY, VOCAB, Draw, fresh, models, train_tiny_drafter
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training
from visual_spec.data.shapes import is_held_out, training_prompts
from visual_spec.models.drafters.eagle import EagleDrafter, logits_of
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.training.drafter import (
    DrafterTraining,
    DrawnPictures,
    acceptance_rates,
    drafter_loss,
    guided_logits,
    target_features,
    train_drafter,
)


def drawn(target: LlamaGenTransformer, encoder: CaptionEncoder, guidance: float) -> DrawnPictures:
    prompts = training_prompts(6, (0, 9))
    tokens = Draw(target, encoder)(prompts, guidance, 5)
    features = target_features(target, encoder(prompts), tokens)
    return DrawnPictures(tokens, features, torch.full((6,), guidance))


def test_training_raises_the_acceptance_at_every_depth_and_leaves_a_record(tmp_path):
    target, encoder = models()
    before = acceptance_rates(fresh(target), target, drawn(target, encoder, 3.0), 3)
    record, drafter, _ = train_tiny_drafter(tmp_path)
    after = acceptance_rates(drafter, target, drawn(target, encoder, 3.0), 3)
    assert all(late > early + 0.1 for early, late in zip(before, after, strict=True))
    losses = [loss for _, loss in record["loss"]]
    assert losses[-1] < losses[0] - 0.2 and record["parameters"] == sum(
        p.numel() for p in drafter.parameters()
    )
    assert len(record["acceptance_rates"]) == 4 and 0 < min(record["acceptance_rates"]) <= 1
    for mine, theirs in zip(models()[0].parameters(), target.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # the target is left as it was


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    calls = []

    def train(out, every):
        record, drafter, draw = train_tiny_drafter(out, every=every)
        calls.append(draw.calls)
        return record, drafter

    check_training(tmp_path, train, 26, every=10, saved={"drafter": EagleDrafter})
    assert calls == [3, 0]  # resumed, the pictures are read, not drawn again


def test_refuses_pictures_of_another_run(tmp_path):
    train_tiny_drafter(tmp_path, steps=1)
    for changed in (dict(seed=1), dict(temperature=0.5)):
        with pytest.raises(ValueError, match="guidance or temperature.*--out"):
            train_tiny_drafter(tmp_path, steps=1, **changed)
    target, encoder = models()
    torch.nn.init.zeros_(target.output.weight[:1])
    draw = Draw(target, encoder)
    with pytest.raises(ValueError, match="00000.pt holds pictures of another target"):
        train_drafter(fresh(target), target, draw, encoder, DrafterTraining(**{**TINY, "steps": 1}), tmp_path)
    assert draw.calls == 0


def test_refuses_settings_that_train_nothing():
    for name in ("pictures", "steps", "unroll", "batch_size"):
        refuses(ValueError, f"{name}=0", DrafterTraining, **cast(Any, {name: 0}))
    refuses(ValueError, "guidance_scales", DrafterTraining, guidance_scales=[])


def test_prompts_are_never_held_out_ones():
    prompts = [text for shard in range(4) for text in training_prompts(30, (0, shard))]
    assert not any(map(is_held_out, prompts)) and len(set(prompts)) > 100


def test_target_features_give_the_targets_laws():
    target, encoder = models()
    target, encoder = target.double(), encoder.double()
    prompts = training_prompts(3, (0, 0))
    tokens = torch.randint(0, VOCAB, (3, SIDE * SIDE), generator=torch.Generator().manual_seed(0))
    condition = encoder(prompts)
    features = target_features(target, condition, tokens)
    conditional = target.teacher_forced(tokens, condition)
    unconditional = target.teacher_forced(tokens, condition, dropped=torch.ones(3, dtype=torch.bool))
    logits = logits_of(target, features)
    assert (logits[0] - conditional).abs().max() < 1e-10
    assert (logits[1] - unconditional).abs().max() < 1e-10
    for scale in (0.5, 1.0, 3.0):
        law = TokenLaw(guidance_scale=scale)
        want = law(torch.cat([conditional, unconditional]) if law.guided else conditional, law.guided)
        got = guided_logits(target, features, torch.full((3,), scale)).log_softmax(-1)
        assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_loss_of_a_drafter_that_is_right_is_the_entropy_of_the_target(monkeypatch, temperature):
    target, encoder = models()
    pictures = drawn(target, encoder, 2.0)
    perfect = pictures.features[:, :, 1:].flatten(0, 1)
    settings = DrafterTraining(unroll=3, unroll_decay=1.0, temperature=temperature)
    drafter = fresh(target)
    monkeypatch.setattr(drafter, "unrolled", lambda target, tokens, features, steps: [perfect] * steps)
    loss = drafter_loss(drafter, target, pictures.tokens, pictures.features, pictures.guidance, settings)
    with torch.no_grad():
        logits = guided_logits(target, pictures.features[:, :, 1:], pictures.guidance)
    law = (logits / temperature).log_softmax(-1)
    entropy = -(law.exp() * law).sum(-1)
    expected = sum(entropy[:, step:].mean() for step in range(3)) / 3
    assert loss.item() == pytest.approx(float(expected), abs=1e-5)
    rates = acceptance_rates(drafter, target, pictures, 3, temperature)
    assert rates == [1.0, 1.0, 1.0]


def test_predicted_acceptance_is_what_the_sampler_meets(tmp_path):
    """The rate of depth 1 against decodes with one draft a call: how many are kept."""
    _, drafter, _ = train_tiny_drafter(tmp_path)
    target, encoder = models()
    prompts = training_prompts(64, (0, 3))
    law = TokenLaw(guidance_scale=3.0)
    sampler, generator = DraftedSampler(1), torch.Generator().manual_seed(0)
    condition = encoder(prompts)
    result = sampler(target, condition, law=law, drafter=drafter, generator=generator, batch_size=64)
    pictures = DrawnPictures(
        result.tokens, target_features(target, condition, result.tokens), torch.full((64,), 3.0)
    )
    rate = acceptance_rates(drafter, target, pictures, 1)[0]
    kept = tests = 0
    for commit_call in result.trace.commit_call:
        per_call = torch.bincount(commit_call)
        drafting = (per_call.cumsum(0) - per_call)[1:] < SIDE * SIDE - 1  # the last slot alone has no draft
        kept += int((per_call[1:][drafting] == 2).sum())
        tests += int(drafting.sum())
    assert kept / tests == pytest.approx(rate, abs=0.04)
