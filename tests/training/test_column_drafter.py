"""Training a drafter of columns on a tiny MusicGen: it learns, resumes to the same weights, says what it reached."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MusicgenForCausalLM

from scripts.train.music import initialise, music_config, tunes_vocabulary
from tests.helpers.music_training import BOOKS, DIM, SIZE, coding_codec
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training
from visual_spec.data.tunes import NUM_FORMS, NUM_FRAMES, caption, sample_tunes
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.training.column_drafter import (
    ColumnDrafterTraining,
    HeardClips,
    acceptance_rates,
    drafter_loss,
    hear,
    play,
    predictions,
    refusal_loss,
    train_column_drafter,
    true_clips,
)
from visual_spec.training.tokens import tokenize_tunes

TINY: dict[str, Any] = dict(clips=3, held_out_clips=2, steps=40, batch_size=3, learning_rate=3e-2)
TINY |= dict(guidance_scales=[2.0], temperature=0.8)


def networks() -> tuple[MusicgenForCausalLM, CaptionEncoder]:
    torch.manual_seed(1)
    model = MusicgenForCausalLM(music_config(SIZE, BOOKS, dim=DIM, num_layers=2, num_heads=2)).eval()
    initialise(model)
    with torch.no_grad():
        for head in model.lm_heads:  # larger than a fresh network's, so that the laws differ
            head.weight.mul_(40)  # pyright: ignore
    return model, CaptionEncoder(tunes_vocabulary(), dim=DIM, num_layers=1, num_heads=2, max_words=20).eval()


def fresh(model: MusicgenForCausalLM) -> ColumnEagleDrafter:
    torch.manual_seed(2)
    return ColumnEagleDrafter.for_target(model)


class Draw:
    """The target's own clips; counts how often it was asked."""

    def __init__(self, model: MusicgenForCausalLM, encoder: CaptionEncoder) -> None:
        self.model, self.encoder, self.calls = model, encoder, 0
        self.law = TokenLaw(guidance_scale=2.0, temperature=0.8)

    def __call__(self, prompts: list[str], seed: int) -> Tensor:
        self.calls += 1
        target, condition = MusicgenColumnModel(self.model, NUM_FRAMES), self.encoder(prompts)
        generator = torch.Generator().manual_seed(seed)
        sampler = ColumnAutoregressiveSampler()
        request: Any = dict(law=self.law, generator=generator, batch_size=len(prompts))
        return target.codes(sampler(target, condition, **request).tokens, condition)


def run(out: Path, **changes: Any) -> tuple[dict, ColumnEagleDrafter, Draw]:
    (model, encoder), every = networks(), changes.pop("every", 10)
    drafter, settings, draw = fresh(model), ColumnDrafterTraining(**{**TINY, **changes}), Draw(model, encoder)
    record = train_column_drafter(drafter, model, encoder, coding_codec(), draw, settings, out, every=every)
    return record, drafter, draw


def heard(target: MusicgenColumnModel, encoder: CaptionEncoder) -> tuple[HeardClips, Tensor, Tensor]:
    """Clips that no training here has seen, their word ids and codes."""
    words, codes = tokenize_tunes(coding_codec(), encoder, 2, 9)
    return hear(target, encoder, words[:, 0], codes, (1,)), words[:, 0], codes


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("drawn", [True, False])
def test_training_raises_the_acceptance(tmp_path, drawn):
    model, encoder = networks()
    target = MusicgenColumnModel(model, NUM_FRAMES)
    words, codes = (
        play(Draw(model, encoder), encoder, 4, 9) if drawn else true_clips(coding_codec(), encoder, 2, 9)
    )
    clips = hear(target, encoder, words, codes, (1,))
    settings = ColumnDrafterTraining(**TINY)
    before = acceptance_rates(fresh(model), target, clips, settings, 3)
    record, drafter, draw = run(tmp_path, drawn=drawn)
    assert draw.calls == 2 * drawn
    after = acceptance_rates(drafter, target, clips, settings, 3)
    assert all(late > early + 0.1 for early, late in zip(before, after, strict=True))
    losses = [loss for _, loss in record["loss"]]
    assert losses[-1] < losses[0] - 0.2 and len(record["acceptance_rates"]) == 4


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("objective", ["cross-entropy", "refusals"])
def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, objective):
    calls = []

    def train(out, every):
        record, drafter, draw = run(out, objective=objective, every=every)
        calls.append(draw.calls)
        return record, drafter

    check_training(tmp_path, train, 26, every=10, saved={"drafter": ColumnEagleDrafter})
    assert calls == [2, 0]  # resumed, the clips are read, not played again


def test_what_is_wanted_are_the_guided_logits_of_decoding():
    model, encoder = networks()
    target = MusicgenColumnModel(model, NUM_FRAMES)
    clips, words, _ = heard(target, encoder)
    batch = clips.batch(torch.arange(2), target.device)
    scales = torch.tensor([2.5, 0.5])  # the second is as good as none
    with torch.no_grad():
        wanted, drafted = predictions(fresh(model), target, *batch, scales, 2)
    count = target.num_steps - 1
    assert wanted.shape == (2, count, BOOKS, SIZE) and len(drafted) == 2 and drafted[0].shape == wanted.shape
    state = target.prefill(encoder(words), batch_size=2, guided=True, window=count)
    steps = torch.arange(count).expand(2, -1)
    conditional, unconditional = target(state, batch[0][:, :-1], steps).chunk(2)
    guided = unconditional + 2.5 * (conditional - unconditional)
    assert (wanted[0] - guided[0]).abs().max() < 0.05 * guided.std()  # kept in half precision
    assert (wanted[1] - conditional[1]).abs().max() < 0.05 * guided.std()


def test_loss_of_a_drafter_that_is_right_is_the_entropy_of_the_target():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(2, 5, 3, 7, generator=generator)
    valid = torch.rand(6, 3, generator=generator) < 0.7
    law = (wanted / 0.5).softmax(-1)
    entropy = -(law * law.log()).sum(-1)  # [2, 5, 3]

    def mean(first: int) -> Tensor:
        return entropy[:, first:][:, valid[1 + first :]].mean()

    loss = drafter_loss(wanted, [wanted, wanted], valid, 0.5, 0.25)
    assert loss.item() == pytest.approx((mean(0) + 0.25 * mean(1)).item() / 1.25, rel=1e-6)
    worse = [wanted, wanted + torch.randn(wanted.shape, generator=generator)]
    assert drafter_loss(wanted, worse, valid, 0.5, 0.25) > loss


def test_refusals_are_the_distance_of_the_laws_of_columns_and_so_is_their_gradient():
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(1, 3, 2, 4, generator=generator, dtype=torch.float64)
    drafted = (wanted + torch.randn(wanted.shape, generator=generator, dtype=torch.float64)).requires_grad_()
    valid = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]]).bool()

    def exact(first: int) -> Tensor:
        """1 - the overlap of the laws of columns; a code that is not there is the same in both."""
        laws = [(logits / 0.7).softmax(-1) for logits in (wanted, drafted)]
        one = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
        laws = [torch.where(valid[1:, :, None], law, one) for law in laws]
        both = [law[0, :, 0, :, None] * law[0, :, 1, None, :] for law in laws]
        return (1 - torch.minimum(*both).sum((-1, -2)))[first:].mean()

    want = (exact(0) + 0.5 * exact(1)) / 1.5
    (slope,) = torch.autograd.grad(want, drafted)
    found = refusal_loss(wanted, [drafted, drafted], valid, 0.7, 0.5, generator, draws=200_000)
    (other,) = torch.autograd.grad(found, drafted)
    assert found.item() == pytest.approx(want.item(), abs=5e-3)
    assert (slope - other).abs().max() < 5e-3 < slope.abs().max() / 5


def test_acceptance_is_one_minus_the_distance_of_the_laws_of_columns():
    model, encoder = networks()
    target, drafter = MusicgenColumnModel(model, NUM_FRAMES), fresh(model)
    clips, *_ = heard(target, encoder)
    settings = ColumnDrafterTraining(**TINY)
    found = acceptance_rates(drafter, target, clips, settings, 2)
    scale = torch.full((2,), settings.guidance_scales[0])
    with torch.no_grad():
        wanted, drafted = predictions(drafter, target, *clips.batch(torch.arange(2), target.device), scale, 2)
    for step, (rate, logits) in enumerate(zip(found, drafted, strict=True)):
        laws = [(given[:, step:] / settings.temperature).softmax(-1) for given in (wanted, logits)]
        both = [law[..., 0, :, None] * law[..., 1, None, :] for law in laws]
        exact = torch.minimum(*both).sum((-1, -2))
        inside = slice(1, -1)  # but for the ends every entry of a column is drawn
        assert rate == pytest.approx(exact[:, inside].mean().item(), abs=4 * 0.5 / exact.numel() ** 0.5)


def test_refuses_settings_that_train_nothing():
    for name in ("clips", "steps", "unroll"):
        refuses(ValueError, f"{name}=0", ColumnDrafterTraining, **{name: 0})
    refuses(ValueError, "guidance_scales", ColumnDrafterTraining, guidance_scales=[])
    refuses(ValueError, "objective='best'", ColumnDrafterTraining, objective="best")
    refuses(ValueError, "temperature=0", ColumnDrafterTraining, temperature=0)


def test_refuses_a_drafter_made_for_another_target(tmp_path):
    model, encoder = networks()
    other = ColumnEagleDrafter(SIZE, BOOKS, DIM, num_layers=5, taps=(1,), num_heads=2, ffn_dim=16)
    with pytest.raises(ValueError, match="num_layers=5.*num_layers=2"):
        settings, draw = ColumnDrafterTraining(**TINY), Draw(model, encoder)
        train_column_drafter(other, model, encoder, coding_codec(), draw, settings, tmp_path)
    assert draw.calls == 0


def test_clips_that_are_played_are_of_their_captions_and_kept(tmp_path):
    model, encoder = networks()
    draw = Draw(model, encoder)
    words, codes = play(draw, encoder, 5, 4, cache=tmp_path)
    prompts = [caption(tune, index % NUM_FORMS) for index, tune in enumerate(sample_tunes(5, 4 * 100_003))]
    assert torch.equal(words, encoder.word_ids(prompts))
    assert torch.equal(codes, draw(prompts, 4 * 100_003).short())
    again = play(draw, encoder, 5, 4, cache=tmp_path)
    assert draw.calls == 2 and torch.equal(again[1], codes)
    other, _ = play(draw, encoder, 5, 4, held_out=True)
    assert not torch.equal(other, words)


@pytest.mark.parametrize("changes", [dict(temperature=0.7), dict(guidance_scales=[3.0]), dict()])
def test_refuses_clips_that_another_model_played(tmp_path, changes):
    model, encoder = networks()
    draw, settings = Draw(model, encoder), ColumnDrafterTraining(**{**TINY, "drawn": True, "steps": 1})
    train_column_drafter(fresh(model), model, encoder, coding_codec(), draw, settings, tmp_path)
    if not changes:
        with torch.no_grad():
            model.lm_heads[1].weight[2].add_(0.1)  # pyright: ignore
    settings = ColumnDrafterTraining(**{**TINY, "drawn": True, "steps": 1, **changes})
    with pytest.raises(ValueError, match="model played.*--out"):
        train_column_drafter(fresh(model), model, encoder, coding_codec(), draw, settings, tmp_path)
