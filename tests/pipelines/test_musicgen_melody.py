"""MusicGen Melody, whose condition is a prefix of the codes: against its own `generate`, and in the pipeline."""

import functools
from typing import Any

import pytest
import torch
from transformers import (
    EncodecConfig,
    MusicgenMelodyConfig,
    MusicgenMelodyDecoderConfig,
    MusicgenMelodyForConditionalGeneration,
    T5Config,
)

import visual_spec
from scripts.train.codec import initialise
from tests.helpers.musicgen import CODES, FRAMES, IDS, MASK, musicgen, native_codes
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_audio import fill_codebooks
from tests.helpers.tiny_t5 import tiny_tokenizer
from tests.models.next_token.tiny_transformers import _ready
from visual_spec.models.columns.encodec import decode_codes
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition, text_condition
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler

CHROMA, LENGTH = 6, 5
STEPS = FRAMES + 3


@functools.cache
def melody(channels: int = 1, width: int = 32, dtype: torch.dtype = torch.float64) -> Any:
    """A whole Melody, random; its prefix has 5 chroma frames in front of the text."""
    decoder = MusicgenMelodyDecoderConfig(
        vocab_size=CODES,
        max_position_embeddings=64,
        num_hidden_layers=2,
        ffn_dim=32,
        num_attention_heads=4,
        hidden_size=width,
        num_codebooks=4 * channels,
        audio_channels=channels,
        pad_token_id=CODES,
        bos_token_id=CODES,
        dropout=0.0,
    )
    config = MusicgenMelodyConfig(
        text_encoder=T5Config(vocab_size=16, d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2),
        audio_encoder=EncodecConfig(
            target_bandwidths=[4 * 4 * 100 / 1000],
            sampling_rate=400,
            hidden_size=8,
            num_filters=2,
            upsampling_ratios=[2, 2],
            num_lstm_layers=1,
            codebook_size=CODES,
        ),
        decoder=decoder,
        num_chroma=CHROMA,
        chroma_length=LENGTH,
    )
    model = _ready(MusicgenMelodyForConditionalGeneration(config), dtype)
    torch.manual_seed(3)
    initialise(model.audio_encoder)  # else the codes of all clips are the same
    fill_codebooks(model.audio_encoder)
    settings = model.generation_config
    settings.decoder_start_token_id = settings.bos_token_id = settings.pad_token_id = CODES
    return model


def tune(length: int, seed: int = 3) -> torch.Tensor:
    """Chroma [3, length, CHROMA], one of which sounds in each frame."""
    generator = torch.Generator().manual_seed(seed)
    sounding = torch.randint(0, CHROMA, (3, length), generator=generator)
    return torch.nn.functional.one_hot(sounding, CHROMA).double()


@pytest.fixture(autouse=True)
def _restored():
    yield
    for channels in (1, 2):
        visual_spec.restore(melody(channels))


@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("length", [None, 2, LENGTH, 9], ids=["no tune", "repeated", "whole", "cut"])
def test_greedy_audio_is_that_of_generate(channels, scale, length):
    """Three captions of different length, whose padding the model sees as zeros."""
    model = melody(channels)
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK)
    if length is not None:
        inputs["input_features"] = tune(length)
    settings = dict(inputs, do_sample=False, guidance_scale=scale, max_new_tokens=STEPS)
    codes = native_codes(model, STEPS, scale, **inputs)
    want = model.generate(**settings)
    assert visual_spec.accelerate(model, "column-jacobi") is model
    got = model.generate(**settings)
    assert model.last_codes.equal(codes) and (got - want).abs().max() < 1e-9
    assert len(codes.unique()) > 6
    visual_spec.accelerate(model)
    assert isinstance(model.sampler, ColumnAutoregressiveSampler)
    assert model.generate_audio(**settings).shape == want.shape and model.last_codes.equal(codes)


def test_clips_go_on_from_codes_as_in_generate():
    model = melody()
    given = torch.randint(0, CODES, (12, 3), generator=torch.Generator().manual_seed(4))
    settings: Any = dict(
        input_ids=IDS,
        attention_mask=MASK,
        input_features=tune(4),
        decoder_input_ids=given,
        do_sample=False,
        guidance_scale=3.0,
        max_new_tokens=STEPS,
    )
    want = model.generate(**settings)
    visual_spec.accelerate(model)
    got = model.generate(**settings)
    assert model.last_codes[..., :3].flatten(0, 1).equal(given)
    assert got.shape == want.shape and (got - want).abs().max() < 1e-9


def test_the_jacobi_sampler_plays_what_plain_sampling_plays():
    model = melody()
    sampling: Any = dict(do_sample=True, temperature=0.9, top_k=6, guidance_scale=2.0, max_new_tokens=20)
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK, input_features=tune(4))
    visual_spec.accelerate(model, "columns")
    want = model.generate(**inputs, **sampling, generator=seeded(1, 2, 3))
    plain, codes = model.last_trace, model.last_codes
    for sampler in (ColumnJacobiSampler(window=6), DraftedColumnSampler(3, acceptance="identical")):
        drafts: Any = dict(drafter=model) if isinstance(sampler, DraftedColumnSampler) else {}
        visual_spec.accelerate(model, sampler, **drafts)
        got = model.generate(**inputs, **sampling, generator=seeded(1, 2, 3))
        assert got.equal(want) and model.last_codes.equal(codes)
        assert (model.last_trace.target_calls < plain.target_calls).any()
    twice = model.generate(
        **{name: value[:1] for name, value in inputs.items()},
        **sampling,
        drafter=melody(1, 16),  # another one
        num_return_sequences=2,
        generator=seeded(1, 5),
    )
    assert len(twice) == 2 and not twice[0].equal(twice[1])


def test_whole_clips_are_scored_as_they_are_decoded():
    """Training and rescoring read all steps at once, with the prefix in front."""
    model = melody()
    columns = MusicgenColumnModel(model, FRAMES)
    text = text_condition(model, IDS, MASK)
    condition = MusicCondition(text.features, text.mask, melody=tune(4))
    law = TokenLaw(temperature=0.0)
    codes = columns.codes(
        ColumnAutoregressiveSampler()(columns, condition, law=law, batch_size=3).tokens, condition
    )
    logits = columns.teacher_forced(codes, condition)
    assert logits.argmax(-1).equal(codes)
    dropped = columns.teacher_forced(codes, condition, dropped=torch.tensor([True, False, False]))
    assert dropped[1:].equal(logits[1:]) and not dropped[0].equal(logits[0])
    nothing = MusicCondition(text.features, torch.zeros_like(text.mask))
    assert (columns.teacher_forced(codes, nothing)[0] - dropped[0]).abs().max() < 1e-10


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_pipeline_follows_a_tune(scale, tmp_path):
    model = melody(dtype=torch.float32)
    pipe = quiet(AudioPipeline.from_musicgen(model, tiny_tokenizer(), max_audio_length_in_s=0.2))
    prompts, features = ["a red circle", "blue"], tune(4)[:2].float()
    settings: Any = dict(guidance_scale=scale, audio_length_in_s=FRAMES / 100, generator=seeded(1, 2))
    output = pipe(prompts, melody_features=features, **settings)
    inputs = tiny_tokenizer()(prompts, padding=True, return_tensors="pt")
    text = text_condition(model, inputs["input_ids"], inputs["attention_mask"])
    condition = MusicCondition(text.features, text.mask, melody=features)
    columns = MusicgenColumnModel(model, FRAMES)
    law = TokenLaw(guidance_scale=scale, top_k=250)
    plain = ColumnAutoregressiveSampler()(columns, condition, law=law, generator=seeded(1, 2), batch_size=2)
    codes = columns.codes(plain.tokens, condition)
    assert output.codes.equal(codes)
    waves = decode_codes(model.audio_encoder, codes).detach()
    assert (torch.from_numpy(output.audios) - waves).abs().max() < 1e-3 * float(waves.abs().max())
    one = pipe(prompts, melody_features=features[:1], **settings | dict(generator=seeded(1, 2)))
    both = pipe(
        prompts, melody_features=features[:1].repeat(2, 1, 1), **settings | dict(generator=seeded(1, 2))
    )
    assert one.codes.equal(both.codes) and not one.codes.equal(codes)
    long: Any = dict(audio_length_in_s=0.3, extend_stride_in_s=0.1, generator=seeded(1, 2))
    windows = pipe(prompts, melody_features=features, **long).codes
    plain_windows = pipe(prompts, **long | dict(generator=seeded(1, 2))).codes
    assert windows.shape[-1] == 30 and not windows[..., 20:].equal(plain_windows[..., 20:])
    pipe.save_pretrained(tmp_path)
    saved = quiet(load_pipeline(tmp_path))
    again = saved(prompts, melody_features=features, **settings | dict(generator=seeded(1, 2)))
    assert again.codes.equal(codes)


def test_what_does_not_fit_is_refused():
    model = melody()
    refuses(TypeError, "MusicgenForCausalLM.*MAGNeT", MagnetModel, model)
    with pytest.raises(TypeError, match="MusicgenMelodyForCausalLM.*MusicgenForConditionalGeneration"):
        visual_spec.accelerate(model.decoder)
    visual_spec.accelerate(model)
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK, max_new_tokens=STEPS)
    for more, error, message in [
        (dict(input_values=torch.zeros(3, 1, 8)), TypeError, "MusicGen Melody.*input_values"),
        (dict(input_features=tune(4)[:2]), ValueError, r"melody \(2, 4, 6\) given; .* \[3, L, 6\]"),
        (dict(input_features=tune(4)[..., :5]), ValueError, r"melody \(3, 4, 5\) given"),
        (dict(input_features=tune(4)[:, :0]), ValueError, r"melody \(3, 0, 6\) given"),
    ]:
        refuses(error, message, model.generate, **inputs, **more)
    other = visual_spec.accelerate(musicgen())
    try:
        refuses(TypeError, "MusicGen.*input_features", other.generate, **inputs, input_features=tune(4))
    finally:
        visual_spec.restore(other)
    columns = MusicgenColumnModel(musicgen(), FRAMES)
    text = text_condition(musicgen(), IDS, MASK)
    with pytest.raises(ValueError, match="MusicgenForConditionalGeneration"):
        columns.check_condition(MusicCondition(text.features, text.mask, melody=tune(4)), 3)
    pipe = AudioPipeline.from_musicgen(model, tiny_tokenizer(), max_audio_length_in_s=0.2)
    for features, message in [
        (tune(4)[:2], r"\(2, 4, 6\).*3.*\[1 or 3, L, 6\]"),
        (tune(4)[0], r"\(4, 6\).*3 prompts"),
    ]:
        refuses(ValueError, message, pipe, ["a", "red", "circle"], melody_features=features)
    plain = AudioPipeline.from_musicgen(musicgen(), tiny_tokenizer(), max_audio_length_in_s=0.2)
    refuses(ValueError, "melody_features.*tune", plain, "a", melody_features=tune(4)[:1])
