"""The trainers of the codec and of the music models, at tiny sizes on a few clips."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import EncodecModel, MusicgenForCausalLM

from scripts.train import codec as codec_module
from scripts.train import music as music_module
from scripts.train.codec import (
    CodecTraining,
    ResidualCodes,
    _first_codes,
    codec_config,
    forward,
    mel_filters,
    mel_spectra,
    train_codec,
    tune_waves,
)
from scripts.train.music import (
    MusicTraining,
    autoregressive_losses,
    column_model,
    hidden_codes,
    initialise,
    masked_losses,
    music_config,
    span_counts,
    span_mask,
    train_music,
    tunes_vocabulary,
)
from scripts.train.waves import si_sdr, spectral_distance
from tests.helpers.music_training import BOOKS, DIM, SIZE, coding_codec, tiny_codec
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, equal
from visual_spec.data.tunes import ATTRIBUTES, NUM_FORMS, NUM_FRAMES, SAMPLE_RATE, caption, sample_tunes
from visual_spec.data.tunes_synth import sample_dataset
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.text.caption_encoder import CaptionEncoder, split_words
from visual_spec.training.tokens import tokenize_tunes

CPU = torch.device("cpu")
CODEC: dict[str, Any] = dict(
    steps=14, batch_size=2, crop=10, continuous_steps=4, clips=2, held_out_clips=1, learning_rate=3e-3
)
# Of which warm-up leaves little.
MUSIC: dict[str, Any] = dict(steps=16, batch_size=3, clips=3, held_out_clips=1, learning_rate=0.1)


def run_codec(out: Path, **changes: Any) -> tuple[dict, EncodecModel]:
    model, every = tiny_codec(), changes.pop("every", 5)
    return train_codec(model, CodecTraining(**{**CODEC, **changes}), out, every=every), model


def networks() -> tuple[MusicgenForCausalLM, CaptionEncoder]:
    torch.manual_seed(1)
    model = MusicgenForCausalLM(music_config(SIZE, BOOKS, dim=DIM, num_layers=1, num_heads=2))
    initialise(model)
    return model, CaptionEncoder(tunes_vocabulary(), dim=DIM, num_layers=1, num_heads=2, max_words=20)


def run_music(out: Path, **changes: Any) -> tuple[dict, MusicgenForCausalLM, CaptionEncoder]:
    (model, encoder), every = networks(), changes.pop("every", 5)
    settings = MusicTraining(**{**MUSIC, **changes})
    return train_music(model, encoder, coding_codec(), settings, out, every=every), model, encoder


# -- the codec --------------------------------------------------------------------------------------------------------


@functools.cache
def trained_codec() -> tuple[dict, EncodecModel, Path]:
    out = Path(tempfile.mkdtemp())
    return *run_codec(out), out


def test_the_trained_codec_is_a_plain_encodec():
    record, model, out = trained_codec()
    loaded = EncodecModel.from_pretrained(out).eval()
    assert equal(loaded, model)
    waves = torch.from_numpy(tune_waves(1, 5)).float()[:, None] / 32767
    with torch.no_grad():
        want, _, _, ids = forward(model, ResidualCodes(model), waves)
        output = loaded(waves, return_dict=True)
    assert torch.equal(output.audio_codes[0, 0], torch.stack(ids)) and len(output.audio_codes.unique()) > 4
    assert output.audio_values.shape == waves.shape
    assert (output.audio_values - want).abs().max() < 1e-5 and want.std() > 1e-3
    assert torch.equal(encode_waves(loaded, waves), output.audio_codes[0])
    # The running sums are where EnCodec keeps them, and give the codes.
    for layer in loaded.quantizer.layers:
        book: Any = layer.codebook
        used = book.cluster_size > 1e-3
        assert used.any()
        assert (book.embed_avg[used] / book.cluster_size[used, None] - book.embed[used]).abs().max() < 1e-5
    assert len(record["codes_used"]) == BOOKS and set(record["heard"]) == {*ATTRIBUTES, "all_correct"}
    held = torch.from_numpy(sample_dataset(1, 12345, held_out=True)[1])[:, None]
    coded = decode_codes(loaded, encode_waves(loaded, held))
    assert record["si_sdr_db"] == round(si_sdr(coded[:, 0], held[:, 0]).item(), 2)
    apart = spectral_distance(coded[:, 0], held[:, 0], sample_rate=SAMPLE_RATE)
    assert record["spectral_distance_db"] == round(apart.item(), 2)


def test_codec_training_lowers_the_loss_the_same_way_every_time(tmp_path):
    _, model, _ = trained_codec()
    whole = codec_module.codec_loss
    waves = torch.from_numpy(tune_waves(2, 0)).float() / 32767
    settings = CodecTraining(**CODEC)
    with torch.no_grad():
        before = whole(forward(tiny_codec(), None, waves[:, None])[0][:, 0], waves, settings)
        after = whole(forward(model, ResidualCodes(model), waves[:, None])[0][:, 0], waves, settings)
    assert after < before - 5
    assert equal(run_codec(tmp_path, every=100)[1], model)


def test_an_interrupted_codec_run_resumes_to_the_same_weights(tmp_path):
    def train(out, every):
        return run_codec(out, every=every)

    # Before and after the start of the codes.
    check_training(tmp_path, train, 4, 10, every=2, saved={"": EncodecModel})


def test_gradients_pass_the_codes_straight_through():
    codes, latents = ResidualCodes(coding_codec()), torch.randn(2, 8, 5, requires_grad=True)
    weight = torch.randn(2, 8, 5)
    coded, commitment, wanted, ids = codes.quantise(latents)
    # A plain loop over the vectors.
    for clip in range(2):
        for frame in range(5):
            left, total, number = latents[clip, :, frame].detach(), torch.zeros(8), clip * 5 + frame
            for book, (given, chosen) in enumerate(zip(wanted, ids, strict=True)):
                assert (given[number] - left).abs().max() < 1e-6
                table = codes.books[book].embed
                nearest = (table - left).square().sum(-1).argmin()
                assert chosen[number] == nearest
                total, left = total + table[nearest], left - table[nearest]
            assert (coded[clip, :, frame] - total).abs().max() < 1e-6
    (gradient,) = torch.autograd.grad((coded * weight).sum(), latents, retain_graph=True)
    assert torch.equal(gradient, weight)
    (gradient,) = torch.autograd.grad(commitment, latents)
    coding = zip(codes.books, wanted, ids, strict=True)
    left = [given - book.embed[chosen] for book, given, chosen in coding]
    squares = [part.square().mean().item() for part in left]
    assert commitment.item() == pytest.approx(np.mean(squares), rel=1e-5)
    want = sum(2 * part / part.numel() / BOOKS for part in left)
    assert (gradient.mT.flatten(0, 1) - want).abs().max() < 1e-6
    partial, _, wanted, ids = codes.quantise(latents, 1)
    assert len(wanted) == len(ids) == 1 and not torch.allclose(partial, coded)


def test_codebooks_start_from_what_is_left_and_follow_it():
    model, rng = tiny_codec(), np.random.default_rng(0)
    codes = ResidualCodes(model)
    latents = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    codes.start(latents, rng)
    stacked = latents.T[None]
    _, _, wanted, ids = codes.quantise(stacked)
    rest = [given.square().mean().item() for given in wanted]
    assert rest[1] < 0.75 * rest[0]
    # Each code is the mean of what it codes.
    for book, given, chosen in zip(codes.books, wanted, ids, strict=True):
        means = torch.stack([given[chosen == number].mean(0) for number in chosen.unique()])
        assert (means - book.embed[chosen.unique()]).square().mean() < 0.02 * given.square().mean()
    moved = latents + 1.0  # what the codes then follow
    before = codes.books[0].embed.clone()
    for _ in range(300):
        _, _, wanted, ids = codes.quantise(moved.T[None])
        codes.follow(wanted[:1], ids[:1], 0.9)
    assert (codes.books[0].embed.mean(0) - before.mean(0)).mean() > 0.5
    left = moved - codes.books[0].embed[ids[0]]
    assert left.square().mean() < 1.2 * rest[1]
    # A code that never served is moved onto a vector.
    codes.books[0].embed[3] = 1e3
    codes.averages[0].idle[3] = 10
    codes.revive(wanted, ids, 5, rng)
    assert (codes.books[0].embed[3] - wanted[0]).square().sum(-1).min() == 0


def test_too_few_vectors_cannot_start_a_codebook():
    vectors = torch.randn(300, 4)
    refuses(ValueError, "300.*301", _first_codes, vectors, 301, np.random.default_rng(0))


def test_mel_spectra_show_the_amplitude_of_a_sine():
    seconds = torch.arange(16_000) / 16_000
    for hertz in (440.0, 2_000.0):
        wave = 0.3 * torch.sin(2 * math.pi * hertz * seconds)[None]
        for window in (512, 2048):
            filters, spectra = mel_filters(window, CPU), mel_spectra(wave, window)
            assert (filters.sum(0) - 1).abs().max() < 1e-5 and (filters >= 0).all()
            middle = spectra[0, :, spectra.shape[-1] // 2]
            # By hand: the window's frequencies under the same triangles.
            at = spectra.shape[-1] // 2 * window // 4 - window // 2
            own = torch.fft.rfft(wave[0, at : at + window] * torch.hann_window(window)).abs() * 4 / window
            assert own.max() == pytest.approx(0.3, rel=0.16)  # up to the loss between two bins
            assert (middle - own @ filters).abs().max() < 1e-4
            loudest = filters[:, middle.argmax()]
            assert abs(float((loudest * torch.linspace(0, 8_000, window // 2 + 1)).sum()) - hertz) < 60


def test_quantiser_dropout_leaves_later_codebooks_alone(tmp_path, monkeypatch):
    counts = []
    real = ResidualCodes.quantise

    def counting(self: ResidualCodes, latents: torch.Tensor, count: int | None = None) -> Any:
        counts.append(count)
        return real(self, latents, count)

    monkeypatch.setattr(ResidualCodes, "quantise", counting)
    run_codec(tmp_path, quantiser_dropout=1.0, steps=10, continuous_steps=2)
    assert set(counts) == {1, 2}


# -- the music models -------------------------------------------------------------------------------------------------


@functools.cache
def trained_music(kind: str) -> tuple[dict, MusicgenForCausalLM, CaptionEncoder, Path]:
    out = Path(tempfile.mkdtemp())
    return *run_music(out, kind=kind), out


@torch.no_grad()
def on_trained_clips(kind: str, model: MusicgenForCausalLM, encoder: CaptionEncoder, out: Path) -> float:
    """Loss on the clips of `trained_music`; of a masked model, of whole clips and the first codebook alone."""
    words, codes = tokenize_tunes(coding_codec(), encoder, 3, 1, cache=out)
    codes, kept = codes.long(), torch.zeros(3, dtype=torch.bool)
    if kind == "autoregressive":
        columns = MusicgenColumnModel(model, NUM_FRAMES)
        nothing = kept[:, None].expand(-1, columns.num_steps - 1)
        return autoregressive_losses(columns, encoder(words[:, 0]), codes, kept, nothing).mean().item()
    first, everything = torch.zeros(3, dtype=torch.long), torch.ones(3, NUM_FRAMES, dtype=torch.bool)
    losses = masked_losses(MagnetModel(model), encoder(words[:, 0]), codes, kept, first, everything)
    return losses.mean().item()


@pytest.mark.parametrize("kind", ["autoregressive", "masked"])
def test_training_lowers_the_loss_and_resumes(kind, tmp_path):
    record, model, encoder, out = trained_music(kind)
    assert on_trained_clips(kind, model, encoder, out) < on_trained_clips(kind, *networks(), out) - 0.1
    assert len(record["held_out_loss_by_codebook"]) == BOOKS
    assert np.mean(record["held_out_loss_by_codebook"]) == pytest.approx(record["held_out_loss"], abs=1e-4)
    saved = {"transformer": MusicgenForCausalLM, "text_encoder": CaptionEncoder}
    check_training(
        tmp_path, lambda folder, every: run_music(folder, kind=kind, every=every), 8, every=5, saved=saved
    )


PATTERNS: list[dict[str, Any]] = [
    dict(pattern="delay"),
    dict(pattern="flat"),
    dict(pattern="stack"),
    dict(pattern="stack_delay", frame_order=[0, 2, 1]),
]


@pytest.mark.parametrize("changes", PATTERNS)
@torch.no_grad()
def test_the_loss_of_a_pattern_is_what_decoding_sees_step_by_step(changes, monkeypatch):
    """With captions and without: the guided rows of decoding are those of dropped captions."""
    monkeypatch.setattr(music_module, "NUM_FRAMES", 10)
    model, encoder = networks()
    columns = column_model(model.double().eval(), MusicTraining(**MUSIC, **changes))
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, SIZE, (3, BOOKS, 10), generator=generator)
    features = torch.randn(3, 4, DIM, generator=generator, dtype=torch.float64)
    condition = TextCondition(features, torch.ones(3, 4, dtype=torch.bool))
    sequence = columns.pattern.apply(codes, columns.special_id).mT
    state = columns.prefill(condition, batch_size=3, guided=True, window=1)
    seen = [state.logits]
    for step in range(columns.num_steps - 1):
        seen.append(columns(state, sequence[:, step : step + 1], torch.full((3, 1), step))[:, 0])
    for half, dropped in enumerate((torch.zeros(3).bool(), torch.ones(3).bool())):
        nothing = torch.zeros(3, columns.num_steps - 1, dtype=torch.bool)
        losses = autoregressive_losses(columns, condition, codes, dropped, nothing)
        for book, steps in enumerate(columns.pattern.steps_by_frame(10).tolist()):
            for frame, step in enumerate(steps):
                for clip in range(3):
                    logits = seen[step][3 * half + clip, book]
                    want = logits.logsumexp(0) - logits[codes[clip, book, frame]]
                    assert abs(losses[clip, book, frame] - want) < 1e-10
    assert losses.std() > 1e-2


def test_a_run_in_another_pattern_resumes(tmp_path):
    def train(out, every):
        return run_music(out, every=every, steps=6, **PATTERNS[3])

    saved = {"transformer": MusicgenForCausalLM, "text_encoder": CaptionEncoder}
    check_training(tmp_path, train, 3, every=2, saved=saved)
    refuses(ValueError, "layout='grouped'.*group_size", run_music, tmp_path / "none", pattern="grouped")
    assert not (tmp_path / "none").exists()


def test_a_kept_text_encoder_is_not_trained_and_low_precision_trains(tmp_path):
    _, fresh = networks()
    record, model, encoder = run_music(tmp_path, train_text_encoder=False, bfloat16=True, steps=2)
    assert equal(encoder, fresh) and math.isfinite(record["held_out_loss"])
    assert not equal(model, networks()[0])


def test_captions_are_all_words_of_the_vocabulary():
    encoder = networks()[1]
    captions = [caption(tune, form) for tune in sample_tunes(300, 3) for form in range(NUM_FORMS)]
    assert not encoder.unknown_words(captions)
    assert max(len(split_words(text)) for text in captions) <= encoder.max_words
    words = set(tunes_vocabulary())
    assert {"sharp", "flat", "drone", "galloping", "a"} <= words


def test_codes_of_a_folder_belong_to_one_codec(tmp_path):
    encoder = networks()[1]
    words, codes = tokenize_tunes(coding_codec(), encoder, 2, 1, cache=tmp_path)
    assert words.shape == (2, NUM_FORMS, 20) and codes.shape == (2, BOOKS, NUM_FRAMES)
    assert len(codes.unique()) > 4
    again = tokenize_tunes(coding_codec(), encoder, 2, 1, cache=tmp_path)
    assert torch.equal(again[0], words) and torch.equal(again[1], codes)
    tunes = sample_tunes(2, 100_003)
    assert torch.equal(words[:, 1], encoder.word_ids([caption(tune, 1) for tune in tunes]))
    refuses(ValueError, "codec.*--out", tokenize_tunes, tiny_codec(), encoder, 2, 1, cache=tmp_path)


def test_span_counts_hide_the_share_that_is_asked_for():
    for frames in (10, 200):
        shares = [1 - math.comb(frames - 3, u) / math.comb(frames, u) for u in range(frames + 1)]
        for percent, count in enumerate(span_counts(frames)):
            assert shares[count] >= percent / 100 - 1e-12
            assert count == 0 or shares[count - 1] < percent / 100
    rng = np.random.default_rng(0)
    shares = np.repeat([0.0, 0.3, 0.7, 1.0], 2_000)
    masks = span_mask(shares, 50, rng).reshape(4, 2_000, 50)
    assert masks[0].any(1).all() and masks[0].sum(1).max() == 3 and masks[3][:, 2:].mean() > 0.999
    for group, share in ((1, 0.3), (2, 0.7)):
        count = span_counts(50)[round(100 * share)]
        hidden = 1 - math.comb(47, count) / math.comb(50, count)
        assert abs(masks[group][:, 2:].mean() - hidden) < 0.01 and abs(hidden - share) < 0.05
    for mask in masks[1]:  # runs of at least three, but for one cut off at the end
        runs = "".join("x" if hidden else " " for hidden in mask)
        assert all(len(run) >= 3 for run in runs[:48].split()[:-1]) if " " in runs else True
    refuses(ValueError, "3 frames.*3", span_counts, 3)


def test_masked_losses_are_those_of_a_plain_loop():
    model, encoder = networks()
    magnet = MagnetModel(model.double(), reach=4)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, SIZE, (3, BOOKS, 12), generator=generator)
    mask = torch.rand(3, 12, generator=generator) < 0.5
    stages = torch.tensor([0, 1, 1])
    features = torch.randn(3, 4, DIM, generator=generator, dtype=torch.float64)
    condition = TextCondition(features, torch.ones(3, 4, dtype=torch.bool))
    dropped = torch.tensor([False, True, False])
    got = masked_losses(magnet, condition, codes, dropped, stages, mask)
    for row, stage in enumerate(stages.tolist()):
        seen = codes[row].clone()
        seen[stage][mask[row]] = SIZE
        seen[stage + 1 :] = SIZE
        assert torch.equal(hidden_codes(stages, mask, BOOKS)[row], seen == SIZE)
        frames = torch.arange(12)
        far = (frames - frames[:, None]).abs() > 4
        bias = torch.zeros(12, 12, dtype=torch.float64).masked_fill(far & (stage > 0), -torch.inf)
        logits = model(
            input_ids=seen,
            attention_mask=bias[None, None],
            encoder_hidden_states=features[row : row + 1] * (not dropped[row]),
            use_cache=False,
        ).logits[stage]
        assert (got[row] - F.cross_entropy(logits, codes[row, stage], reduction="none")).abs().max() < 1e-10


def test_what_does_not_fit_is_refused(tmp_path):
    model, encoder = networks()
    other = MusicgenForCausalLM(music_config(SIZE, BOOKS + 1, dim=DIM, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="3 codebooks.*16.*2.*16"):
        train_music(other, encoder, coding_codec(), MusicTraining(), tmp_path)
    narrow = CaptionEncoder(["a"], dim=8, num_layers=0, num_heads=1)
    refuses(ValueError, "width 8.*16", train_music, model, narrow, coding_codec(), MusicTraining(), tmp_path)
    config = codec_config(num_filters=2, hidden_size=8, codebook_size=SIZE)
    config.sampling_rate = 32_000
    refuses(ValueError, "32000 Hz", train_codec, EncodecModel(config), CodecTraining(), tmp_path)
    for wrong in (dict(steps=0), dict(clips=0), dict(caption_dropout=1.5), dict(kind="diffusion")):
        refuses(ValueError, f"{next(iter(wrong))}=", MusicTraining, **wrong)
    for wrong in (dict(steps=0), dict(crop=201), dict(quantiser_dropout=-1.0)):
        refuses(ValueError, f"{next(iter(wrong))}=", CodecTraining, **wrong)
