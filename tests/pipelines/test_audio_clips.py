"""Clips that are streamed, longer than the window, gone on from, and written to files. The models are tiny."""

import io
import math
import sys
import wave
from typing import Any

import numpy as np
import pytest
import torch
from torchaudio import functional

from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_audio import BOOKS, FRAMES, HOP, PROMPT, RATE, clip_of, tiny_audio_pipeline
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.pipelines import audio as audio_module
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.audio_files import audio_bytes, in_parts, prepare_clip, resample, write_audio
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


@pytest.fixture
def pipe() -> AudioPipeline:
    return tiny_audio_pipeline()


# -- streaming and long form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "length", "pattern"),
    [
        (ColumnAutoregressiveSampler(), None, "delay"),
        (ColumnAutoregressiveSampler(), 0.33, "coarse_first"),
        (ColumnJacobiSampler(window=6), 0.33, "delay"),
        (ColumnJacobiSampler(window=6), None, "coarse_first"),
    ],
)
def test_streamed_audio_is_the_audio(sampler, length, pattern):
    pipe = tiny_audio_pipeline(sampler, pattern=pattern)
    heard: list[tuple[int, torch.Tensor, int]] = []
    calls = [0]

    def count(*_):
        calls[0] += 1

    def listen(given, start, waves):
        assert given is pipe
        heard.append((start, waves, calls[0]))

    settings: Any = dict(
        audio_length_in_s=length, extend_stride_in_s=0.1, stretch_in_s=0.02, output_type="pt"
    )
    plain = pipe([PROMPT] * 3, generator=seeded(1, 2, 3), **settings)
    live = pipe(
        [PROMPT] * 3,
        generator=seeded(1, 2, 3),
        callback_on_audio=listen,
        callback_on_step_end=count,
        **settings,
    )
    assert live.codes.equal(plain.codes) and live.audios.equal(plain.audios)
    assert torch.cat([waves for _, waves, _ in heard], -1).equal(plain.audios)
    starts = [0, *np.cumsum([waves.shape[-1] for _, waves, _ in heard])[:-1].tolist()]
    assert [start for start, _, _ in heard] == starts and len(heard) > 2
    # Heard while the window is decoded, not after it.
    if isinstance(sampler, ColumnAutoregressiveSampler) and pattern == "delay":
        assert len({call for *_, call in heard}) > 2 and heard[0][2] < calls[0] * 0.8


def test_no_frame_waits_longer_than_it_must():
    """Of plain sampling column by column: frame t is known when the column after its last code is drawn."""
    pipe = tiny_audio_pipeline()
    arrived: dict[int, int] = {}
    put: list[int] = [0]

    class Watch(audio_module.WaveStream):
        def __call__(self, codes):
            for frame in range(self.received, self.received + codes.shape[-1]):
                arrived[frame] = put[0]
            super().__call__(codes)

    def count(_, step, __, ___):
        put[0] = step + 1  # the sampler's own callback comes before the stream's next turn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio_module, "WaveStream", Watch)
        pipe(
            PROMPT,
            generator=seeded(1),
            stretch_in_s=0.01,
            callback_on_audio=lambda *_: None,
            callback_on_step_end=count,
        )
    # Step t + 2 holds the last code of frame t. Its column is fed at the call after it, that is call t + 3.
    assert arrived == {frame: min(frame + 4, FRAMES + BOOKS - 1) for frame in range(FRAMES)}


def test_long_form_is_the_windows_one_after_the_other(pipe):
    """By hand: each window goes on from the last ten frames, with the next key of the clip's generator."""
    output = pipe([PROMPT] * 2, generator=seeded(1, 2), audio_length_in_s=0.47, extend_stride_in_s=0.1)
    text, generators = pipe.make_condition([PROMPT] * 2), seeded(1, 2)
    codes = torch.zeros(2, BOOKS, 0, dtype=torch.long)
    for kept, new in [(0, 20), (10, 10), (10, 10), (10, 7)]:
        columns = MusicgenColumnModel(pipe.transformer, kept + new, prompt_frames=kept)
        condition = MusicCondition(text.features, text.mask, codes[..., codes.shape[-1] - kept :])
        result = ColumnAutoregressiveSampler()(
            columns, condition, law=pipe.make_law(), generator=generators, batch_size=2
        )
        codes = torch.cat([codes, columns.codes(result.tokens, condition)[..., kept:]], -1)
    assert output.codes.equal(codes) and codes.shape[-1] == 47
    assert np.abs(output.audios - decode_codes(pipe.codec, codes).numpy()).max() < 1e-5  # no seams
    first = pipe([PROMPT] * 2, generator=seeded(1, 2))
    assert output.codes[..., :FRAMES].equal(first.codes)
    pipe.sampler = ColumnJacobiSampler()
    again = pipe([PROMPT] * 2, generator=seeded(1, 2), audio_length_in_s=0.47, extend_stride_in_s=0.1)
    assert again.codes.equal(codes)


def test_the_memory_of_long_form_is_that_of_a_window(pipe, monkeypatch):
    """The cache holds one window, and the decoder's stream what its convolutions look back."""
    places, kept = [], []
    plain = MusicgenColumnModel.prefill

    def prefill(self, *args, **kwargs):
        state = plain(self, *args, **kwargs)
        places.append(state.positions.shape[0] + kwargs["window"])
        return state

    class Watch(audio_module.WaveStream):
        def __call__(self, codes):
            super().__call__(codes)
            inner: Any = (self.decoder.first.kept, self.decoder.others.kept, self._waiting)
            kept.append(max(part.shape[-1] for part in inner if part is not None))

    monkeypatch.setattr(MusicgenColumnModel, "prefill", prefill)
    monkeypatch.setattr(audio_module, "WaveStream", Watch)
    pipe.sampler = ColumnJacobiSampler(window=8)
    law: Any = dict(temperature=0.0, guidance_scale=1.0)
    output = pipe(PROMPT, audio_length_in_s=3, extend_stride_in_s=0.15, stretch_in_s=0.1, **law)
    assert output.audios.shape == (1, 1, 3 * RATE) and len(places) == 20
    assert max(places) <= 1 + FRAMES + BOOKS - 1 + 8 and max(kept) <= 10 + 20


@pytest.mark.parametrize(
    ("length", "stride", "given", "windows"),
    [
        (0.2, None, 0, [(0, 20)]),
        (0.2, 0.1, 7, [(7, 13)]),
        (0.3, 0.15, 0, [(0, 20), (5, 10)]),
        (0.4, 0.1, 3, [(3, 17), (10, 10), (10, 10)]),
        (0.4, 0.05, 18, [(15, 5), (15, 5), (15, 5), (15, 5), (15, 2)]),
        (0.5, 0.1, 40, [(10, 10)]),
    ],
)
def test_windows(pipe, length, stride, given, windows):
    assert pipe.plan(length, stride, given) == windows
    assert given + sum(new for _, new in windows) == round(length * 100)


# -- going on from a clip ---------------------------------------------------------------------------------------------


def test_every_clip_of_a_prompt_goes_on_from_the_prompts_own_clip(pipe):
    waves = np.stack([clip_of(6), -clip_of(6)])
    prompts = encode_waves(pipe.codec, torch.from_numpy(waves))
    assert not prompts[0].equal(prompts[1])
    asked: Any = dict(sampling_rate=RATE, output_type="latent")
    texts = ["red", PROMPT]
    found = pipe(texts, audio=waves, num_waveforms_per_prompt=2, generator=seeded(1, 2, 3, 4), **asked).codes
    masks = pipe.make_condition(texts, num_waveforms_per_prompt=2).mask.sum(1).tolist()
    assert masks[0] == masks[1] < masks[2] == masks[3]
    for row in range(4):
        assert found[row, :, :6].equal(prompts[row // 2])
        alone = pipe(texts[row // 2], audio=waves[row // 2], generator=seeded(row + 1), **asked).codes
        assert alone[0].equal(found[row])


def test_music_goes_on_from_a_clip(pipe):
    wave_in = clip_of(6)
    output = pipe([PROMPT] * 2, audio=wave_in, sampling_rate=RATE, generator=seeded(1, 2))
    prompt = encode_waves(pipe.codec, torch.from_numpy(wave_in)[None])
    assert output.codes.shape == (2, BOOKS, FRAMES)
    assert output.codes[..., :6].equal(prompt.expand(2, -1, -1)) and prompt.shape[-1] == 6
    assert len(prompt.unique()) > 4
    heard: list[int] = []
    pipe(
        PROMPT,
        audio=wave_in[0],
        sampling_rate=RATE,
        stretch_in_s=0.01,
        callback_on_audio=lambda _, start, waves: heard.append(start),
    )
    assert heard[0] == 0
    other = pipe([PROMPT] * 2, audio=-wave_in, sampling_rate=RATE, generator=seeded(1, 2))
    assert not other.codes[..., 6:].equal(output.codes[..., 6:])
    pipe.sampler = ColumnJacobiSampler()
    fast = pipe([PROMPT] * 2, audio=wave_in, sampling_rate=RATE, generator=seeded(1, 2))
    assert fast.codes.equal(output.codes)
    long = pipe(
        [PROMPT] * 2,
        audio=np.stack([clip_of(30), -clip_of(30)]),
        sampling_rate=RATE,
        audio_length_in_s=0.5,
        extend_stride_in_s=0.1,
        generator=seeded(1, 2),
    )
    assert long.codes.shape[-1] == 50 and not long.codes[0, :, :30].equal(long.codes[1, :, :30])


def test_clips_are_brought_to_the_codecs_rate_and_channels():
    with pytest.warns(UserWarning, match="the clip has 2 channels; it is averaged to mono"):
        mono = prepare_clip(clip_of(3, 2), RATE, rate=RATE, channels=1)
    assert torch.allclose(mono[0, 0], torch.from_numpy(clip_of(3, 2)).mean(0))
    with pytest.warns(UserWarning, match="1 channels; it stands in both"):
        assert prepare_clip(clip_of(3)[0], RATE, rate=RATE, channels=2).shape == (1, 2, 3 * HOP)
    with pytest.warns(UserWarning, match="the clip is resampled from 800 Hz to 400 Hz"):
        assert prepare_clip(clip_of(6), 800, rate=RATE, channels=1).shape == (1, 1, 3 * HOP)


@pytest.mark.parametrize(
    ("rate", "wanted"), [(12, 5), (5, 12), (441, 320), (401, 400), (7, 5), (3, 1000), (1009, 1000)]
)
def test_resampling_in_parts_is_torchaudios(rate, wanted):
    for length in (1, 2, 50, 1003):
        clip = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        want = functional.resample(clip, rate, wanted)
        for found in (
            in_parts(clip, rate, wanted),
            resample(clip, rate, wanted),
            resample(clip, 2 * rate, 2 * wanted),
        ):
            torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_without_torchaudio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchaudio.functional", None)
    with pytest.raises(ImportError, match=r"44100 Hz to 32000 Hz.*pip install '\.\[audio\]'"):
        resample(torch.zeros(1, 50), 44100, 32000)
    assert resample(torch.zeros(1, 50), 400, 400).shape == (1, 50)


def test_rates_without_a_common_factor_take_no_kernel_of_rate_times_rate(monkeypatch):
    largest, plain = [], torch.nn.functional.conv1d
    monkeypatch.setattr(
        torch.nn.functional,
        "conv1d",
        lambda clip, kernel, **more: (largest.append(kernel.numel()), plain(clip, kernel, **more))[1],
    )
    tone = torch.sin(2 * math.pi * 440 * torch.arange(8009) / 8009)
    found = resample(tone, 8009, 16000)
    want = torch.sin(2 * math.pi * 440 * torch.arange(16000) / 16000)
    assert found.shape == (16000,) and (found - want)[200:-200].abs().max() < 1e-2
    assert max(largest) < 10_000


# -- files ------------------------------------------------------------------------------------------------------------


def test_wav_files_need_nothing_but_python(pipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    output = pipe([PROMPT] * 2, generator=seeded(1, 2))
    path = output.save(tmp_path / "deep" / "tune.wav", 1)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert np.abs(samples / 32767 - output.audios[1, 0].clip(-1, 1)).max() < 1e-4
    assert [item.name for item in path.parent.iterdir()] == ["tune.wav"]
    refuses(FileExistsError, "tune.wav exists", output.save, path)
    assert output.save(path, overwrite=True) == path
    for kind in ("flac", "ogg"):
        refuses(ImportError, rf"{kind}.*soundfile.*\[audio\]", output.save, tmp_path / f"tune.{kind}")
    refuses(ValueError, "output_type", pipe(PROMPT, output_type="latent").save, tmp_path / "codes.wav")


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg"])
@pytest.mark.parametrize("channels", [1, 2])
def test_files_are_read_back(tmp_path, kind, channels):
    soundfile = pytest.importorskip("soundfile")
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    clip = np.stack([tone, -tone])[:channels].astype(np.float32)
    samples, rate = soundfile.read(write_audio(tmp_path / f"a.{kind}", clip, 16000), always_2d=True)
    assert rate == 16000 and samples.shape == (16000, channels)
    assert np.abs(samples.T - clip)[:, 200:-200].max() < (0.05 if kind == "ogg" else 1e-4)


@pytest.mark.parametrize(
    ("audio", "kind", "message"),
    [
        (np.zeros(4), "mp3", "'mp3'.*flac"),
        (np.zeros((3, 4)), "wav", r"\(3, 4\).*clip"),
        (np.zeros((1, 0)), "wav", r"shape \(1, 0\)"),
        (np.array([0.0, np.nan]), "wav", "nan.*infinity"),
    ],
)
def test_what_is_no_clip_is_not_written(audio, kind, message):
    refuses(ValueError, message, audio_bytes, audio, 100, kind)


def test_loud_samples_are_cut_off_and_do_not_wrap():
    with wave.open(io.BytesIO(audio_bytes(torch.tensor([1.5, -1.5, 0.0]), 100))) as file:
        assert np.frombuffer(file.readframes(3), "<i2").tolist() == [32767, -32767, 0]
