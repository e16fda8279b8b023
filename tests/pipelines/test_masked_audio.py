"""The music pipeline around a masked model plays what the sampler decodes, window by window; official files too."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.audiocraft_files import (
    CODEC_SETTINGS,
    SETTINGS,
    TEXT,
    codec_weights,
    language_model_weights,
    write,
)
from tests.helpers.music_settings import magnet_sampler
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_audio import BOOKS, HOP, LONGEST, RATE, tiny_audio_pipeline
from tests.helpers.tiny_t5 import tiny_t5, tiny_tokenizer
from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MagnetModel
from visual_spec.models.masked.magnet_checkpoint import load_magnet
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.audio_stream import plan_windows
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import LawByStep, Schedule

PROMPT = "a slow sad organ"
FRAMES = round(LONGEST * RATE / HOP) // 3 * 3  # whole spans
LAW = dict(default_guidance_scale=2.0, default_temperature=1.7, default_top_p=0.9)


@pytest.fixture
def pipe() -> AudioPipeline:
    return tiny_audio_pipeline(magnet_sampler(), masked=True, reach=4, **LAW)


def by_hand(
    pipe: AudioPipeline, condition: Any, given: torch.Tensor, new: int, generators: Any
) -> torch.Tensor:
    model = MagnetModel(pipe.transformer, given.shape[-1] + new, reach=4)
    law = TokenLaw(guidance_scale=2.0, temperature=1.7, top_p=0.9)
    asked: dict[str, Any] = dict(
        law=law, generator=generators, batch_size=len(given), known_tokens=model.known_tokens(given)
    )
    return magnet_sampler()(model, condition, **asked).tokens.transpose(1, 2)


def test_a_clip_is_what_the_sampler_decodes(pipe):
    output = pipe([PROMPT, "melody"], generator=seeded(1, 2))
    condition, nothing = pipe.make_condition([PROMPT, "melody"]), torch.zeros(2, BOOKS, 0, dtype=torch.long)
    codes = by_hand(pipe, condition, nothing, FRAMES, seeded(1, 2))
    assert output.codes.equal(codes) and output.trace.target_calls.tolist() == [8, 8]
    assert np.abs(output.audios - decode_codes(pipe.codec, codes).numpy()).max() < 1e-5
    alone = pipe("melody", generator=seeded(2))
    assert alone.codes.equal(codes[1:])


def test_long_form_goes_on_from_what_is_kept(pipe):
    output = pipe(PROMPT, generator=seeded(1), audio_length_in_s=0.36, extend_stride_in_s=0.1)
    condition, generators = pipe.make_condition(PROMPT), seeded(1)
    codes = torch.zeros(1, BOOKS, 0, dtype=torch.long)
    for kept, new in [(0, 18), (8, 10), (10, 8)]:
        window = by_hand(pipe, condition, codes[..., codes.shape[-1] - kept :], new, generators)
        codes = torch.cat([codes, window[..., kept:]], -1)
    assert output.codes.equal(codes)
    trace = output.trace
    assert trace.target_calls.tolist() == [24] and trace.entry_call.shape == (1, 36, BOOKS)
    first, second, third = trace.entry_call.split([18, 10, 8], 1)
    assert (0, 7) == (int(first.min()), int(first.max())) and (8, 15) == (
        int(second.min()),
        int(second.max()),
    )
    assert (16, 23) == (int(third.min()), int(third.max()))


def test_music_goes_on_from_a_clip_and_is_streamed(pipe):
    clip = np.random.default_rng(3).uniform(-0.5, 0.5, (1, 7 * HOP)).astype(np.float32)
    heard = []
    output = pipe(
        PROMPT,
        audio=clip,
        sampling_rate=RATE,
        generator=seeded(1),
        callback_on_audio=lambda _, start, waves: heard.append((start, waves)),
    )
    given = encode_waves(pipe.codec, torch.from_numpy(clip)[None])
    codes = by_hand(pipe, pipe.make_condition(PROMPT), given, FRAMES - 7, seeded(1))
    assert output.codes.equal(codes) and output.codes[..., :7].equal(given)
    assert np.array_equal(torch.cat([waves for _, waves in heard], -1).numpy(), output.audios)


@pytest.mark.parametrize(
    "length, stride, given, windows",
    [
        (10.0, None, 0, [(0, 498)]),
        (10.0, None, 100, [(100, 398)]),
        # As in audiocraft: windows of 500 frames lose two of them, before the next one is planned.
        (20.0, 5.0, 0, [(0, 498), (248, 250), (248, 250), (248, 1)]),
        (0.06, None, 0, [(0, 3)]),
    ],
)
def test_windows_are_of_whole_spans(length, stride, given, windows):
    assert plan_windows(length, stride, given, limit=10.0, frame_rate=50.0, span=3) == windows
    assert plan_windows(10.0, None, limit=10.0, frame_rate=50.0) == [(0, 500)]


def test_clips_shorter_than_a_span_are_refused(pipe):
    refuses(ValueError, r"audio_length_in_s=0\.02.*3.*0\.03", pipe, PROMPT, audio_length_in_s=0.02)


def test_official_files(tmp_path):
    halves = {name: value.half() for name, value in language_model_weights().items()}
    write(tmp_path, "state_dict.bin", halves, SETTINGS)
    write(tmp_path, "compression_state_dict.bin", codec_weights(), CODEC_SETTINGS)
    encoder, tokenizer = tiny_t5(d_model=TEXT), tiny_tokenizer()
    # The two files are of two rates; 8 frames are what the first calls its length.
    pipe = AudioPipeline.from_magnet(tmp_path, encoder, tokenizer, max_audio_length_in_s=8 * 6 / 400)
    assert pipe.transformer.dtype == torch.float32
    assert (
        AudioPipeline.from_magnet(tmp_path, encoder, tokenizer, dtype=None).transformer.dtype == torch.float16
    )
    pipe.set_progress_bar_config(disable=True)
    output = pipe(["a red circle", "blue"], generator=seeded(1, 2))

    network, own = load_magnet(tmp_path)
    model = MagnetModel(network, own.num_frames, reach=own.reach, padding="zeros")
    inputs = tokenizer(["a red circle", "blue"], padding=True, return_tensors="pt")
    with torch.no_grad():
        features = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    condition = TextCondition(features, inputs["attention_mask"].bool())
    official = MaskedSampler(
        own.steps,
        span=own.span,
        schedule=Schedule(clock="magnet"),
        by_step=LawByStep(temperature="falling", guidance="falling", least_guidance=own.least_guidance),
    )
    law = TokenLaw(
        guidance_scale=own.guidance_scale, temperature=own.temperature, top_k=own.top_k, top_p=own.top_p
    )
    result = official(model, condition, law=law, generator=seeded(1, 2), batch_size=2)
    codes = model.codes(result.tokens)
    assert output.codes.equal(codes)
    waves = decode_codes(load_audiocraft_codec(tmp_path), codes)
    assert np.abs(output.audios - waves.numpy()).max() < 1e-5
    refuses(ValueError, r"AudioPipeline\.from_magnet", pipe.save_pretrained, tmp_path / "saved")
