"""AudioPipeline: what comes out, what is kept in a folder, what becomes of official files, and what is refused."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MusicgenForConditionalGeneration, T5EncoderModel

from tests.helpers.audiocraft_files import MUSICGEN_SETTINGS, SETTINGS, TEXT, changed, write_language_model
from tests.helpers.musicgen import write_musicgen
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_audio import (
    BOOKS,
    FRAMES,
    HOP,
    PROMPT,
    RATE,
    clip_of,
    tiny_audio_pipeline,
    tiny_codec,
    tiny_decoder,
    tiny_musicgen,
    tiny_words,
)
from tests.helpers.tiny_t5 import tiny_t5, tiny_tokenizer
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.columns.musicgen_checkpoint import load_musicgen
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines import embedded
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


@pytest.fixture
def pipe() -> AudioPipeline:
    return tiny_audio_pipeline()


# -- playing ----------------------------------------------------------------------------------------------------------


def test_waves_are_those_of_the_codes(pipe):
    played = pipe(PROMPT, generator=seeded(7), output_type="pt")
    assert (played.audios - decode_codes(pipe.codec, played.codes)).abs().max() < 1e-5
    assert played.sampling_rate == RATE and played.trace.target_calls.tolist() == [FRAMES + BOOKS - 1]
    assert pipe(PROMPT, audio_length_in_s=0.07).audios.shape == (1, 1, 7 * HOP)


def test_unknown_words_are_named(pipe):
    with pytest.warns(UserWarning, match="does not know 'kazoo'; the music will not tell"):
        pipe("a slow kazoo")


def test_callback_and_progress_count_columns_over_all_windows(pipe):
    pipe.sampler = ColumnJacobiSampler(window=4)
    shown, seen = io.StringIO(), []
    pipe.set_progress_bar_config(disable=False, file=shown, mininterval=0)

    def callback(given, step, timestep, kwargs):
        assert given is pipe
        seen.append((step, timestep, kwargs["lengths"].tolist()))

    settings: Any = dict(audio_length_in_s=0.5, extend_stride_in_s=0.1)
    output = pipe([PROMPT] * 2, generator=seeded(1, 2), callback_on_step_end=callback, **settings)
    columns = output.trace.commit_call.shape[1]
    assert columns == 22 + 3 * 12  # a window of 20 frames, three that add 10, and two columns of delay each
    assert [step for step, _, _ in seen] == list(range(len(seen)))
    assert seen[-1][1:] == (columns, [columns] * 2) and all(t == min(lengths) for _, t, lengths in seen)
    assert f"{2 * columns}/{2 * columns}" in shown.getvalue() and "columns per call" in shown.getvalue()
    assert int(output.trace.commit_call.max()) == len(seen) - 1


@pytest.mark.fast_sets(4)
@pytest.mark.parametrize(
    ("pattern", "settings"),
    [
        ("delay", None),
        ("delay", {"delays": [0] * (BOOKS - 1) + [2]}),
        ("parallel", None),
        ("flat", None),
        ("flat", {"levels": [0] * (BOOKS - 1) + [1]}),
        ("coarse_first", None),
        ("grouped", {"group_size": 1}),
        ("grouped", {"group_size": BOOKS}),
        ("stack", None),
        ("stack_delay", {"frame_order": [0, 2, 1]}),
    ],
)
def test_patterns_by_name(pattern, settings, tmp_path):
    pipe = tiny_audio_pipeline(pattern=pattern, pattern_settings=settings)
    codes = pipe(PROMPT, generator=seeded(1), output_type="latent").codes
    pipe.save_pretrained(tmp_path)
    again = AudioPipeline.from_pretrained(tmp_path)
    assert again(PROMPT, generator=seeded(1), output_type="latent").codes.equal(codes)
    layout = CodebookPattern.named(pattern, BOOKS, **(settings or {}))
    columns = MusicgenColumnModel(pipe.transformer, FRAMES, pattern=layout)
    result = ColumnAutoregressiveSampler()(
        columns, pipe.make_condition(PROMPT), law=pipe.make_law(), generator=seeded(1)
    )
    assert codes.equal(columns.codes(result.tokens, pipe.make_condition(PROMPT)))


def test_relaxed_acceptance_gets_the_codes_of_each_codebook(pipe):
    pipe.sampler = ColumnJacobiSampler(
        acceptance="grouped", coupling="independent", unit="codebook", relaxation={"group_size": 3}
    )
    trace = pipe(PROMPT, generator=seeded(1)).trace
    assert not trace.lossless and trace.divergence > 0


# -- saving and loading -----------------------------------------------------------------------------------------------


def test_half_precision_on_disk_is_computed_in_float32(tmp_path):
    tiny_audio_pipeline().to(torch.float16).save_pretrained(tmp_path)
    loaded = AudioPipeline.from_pretrained(tmp_path)
    for name in ("transformer", "codec", "text_encoder"):
        assert getattr(loaded, name).dtype == torch.float32
    assert AudioPipeline.from_pretrained(tmp_path, dtype=torch.float64).codec.dtype == torch.float64


def test_a_whole_musicgen_brings_its_own_parts(tmp_path):
    model = tiny_musicgen(dtype=torch.float32)
    pipe = quiet(AudioPipeline.from_musicgen(model, tiny_tokenizer(), max_audio_length_in_s=0.1))
    assert pipe.make_law().guidance_scale == 3.0 and pipe.make_law().top_k == 250
    prompts = ["a red circle on a square .", "blue"]
    output = pipe(prompts, generator=seeded(1, 2))
    assert output.codes.shape == (2, 4, 10)
    alone = pipe(prompts[1], generator=seeded(2))  # without the padding of its neighbour
    assert alone.codes[0].equal(output.codes[1])
    pipe.save_pretrained(tmp_path)
    loaded = quiet(AudioPipeline.from_pretrained(tmp_path))
    assert isinstance(loaded.transformer, MusicgenForConditionalGeneration)
    assert loaded(prompts, generator=seeded(1, 2)).codes.equal(output.codes)
    assert embedded.describe(tmp_path)["sampling_rate"] == 400
    clip = pipe("red", audio=clip_of(4), sampling_rate=400, generator=seeded(3))
    assert clip.codes[..., :4].equal(encode_waves(model.audio_encoder, torch.from_numpy(clip_of(4))[None]))


def test_relaxed_acceptance_of_stereo_gets_each_codebook_in_the_place_of_its_codes():
    pipe: Any = AudioPipeline.from_musicgen(
        tiny_musicgen(2, dtype=torch.float32), tiny_tokenizer(), max_audio_length_in_s=0.1
    )
    pipe.sampler = ColumnJacobiSampler(coupling="maximal", acceptance="lantern", unit="codebook")
    codec = pipe.transformer.audio_encoder
    clip = torch.randn(1, 2, 160, generator=torch.Generator().manual_seed(0))
    both = encode_waves(codec, clip)[0]
    sides = [encode_waves(codec, clip[:, channel : channel + 1])[0] for channel in (0, 1)]
    books = [layer.codebook.embed for layer in codec.quantizer.layers]
    given = pipe.sampler_parts()["codebook"]
    assert len(given) == len(both) == 2 * len(books)
    for codes, book in zip(both, given, strict=True):
        (level,) = {level for side in sides for level in range(len(books)) if codes.equal(side[level])}
        assert book.equal(books[level])


def test_a_text_encoder_of_transformers_beside_its_tokenizer(tmp_path):
    encoder = tiny_t5(d_model=32)
    pipe = AudioPipeline(
        tiny_decoder(),
        tiny_codec(),
        encoder,
        ColumnJacobiSampler(),
        tiny_tokenizer(),
        max_audio_length_in_s=0.1,
    )
    pipe.set_progress_bar_config(disable=True)
    output = pipe(["a red circle", "blue"], generator=seeded(1, 2))
    inputs = tiny_tokenizer()(["a red circle", "blue"], padding=True, return_tensors="pt")
    with torch.no_grad():
        features = encoder(
            **{name: inputs[name] for name in ("input_ids", "attention_mask")}
        ).last_hidden_state
    told = pipe(
        prompt_embeds=features, prompt_attention_mask=inputs["attention_mask"], generator=seeded(1, 2)
    )
    assert told.codes.equal(output.codes)
    pipe.save_pretrained(tmp_path)
    loaded = AudioPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.text_encoder, T5EncoderModel)
    assert loaded(["a red circle", "blue"], generator=seeded(1, 2)).codes.equal(output.codes)
    pipe.tokenizer = None
    refuses(ValueError, r"prompt_embeds.*pipe\.tokenizer", pipe, "a red circle")


# -- bad input, refused before any computation ------------------------------------------------------------------------

BAD_INPUT: dict[str, tuple[dict[str, Any], Any, str]] = {
    "no length": (dict(audio_length_in_s=0), ValueError, r"audio_length_in_s=0.*0\.01.*0\.2"),
    "a negative length": (dict(audio_length_in_s=-1.0), ValueError, "audio_length_in_s=-1.0"),
    "an endless length": (dict(audio_length_in_s=math.inf), ValueError, "audio_length_in_s=inf"),
    "beyond the limit": (
        dict(audio_length_in_s=60),
        ValueError,
        r"audio_length_in_s=60.*0\.2.*extend_stride_in_s.*0\.12",
    ),
    "no stride": (dict(extend_stride_in_s=0), ValueError, r"extend_stride_in_s=0.*0\.01.*0\.2"),
    "a stride as long as the window": (dict(extend_stride_in_s=0.2), ValueError, "extend_stride_in_s=0.2"),
    "a clip that fills the length": (
        dict(audio=np.zeros((1, 84), np.float32), sampling_rate=RATE),
        ValueError,
        r"0\.21.*audio_length_in_s=0\.2",
    ),
    "a clip of nan": (
        dict(audio=np.full((1, 8), np.nan, np.float32), sampling_rate=RATE),
        ValueError,
        "audio.*nan",
    ),
    "a clip without its rate": (
        dict(audio=np.zeros(8, np.float32)),
        ValueError,
        r"pass sampling_rate .* 400",
    ),
    "a rate without its clip": (dict(sampling_rate=16000), ValueError, "sampling_rate=16000"),
    "a rate of zero": (
        dict(audio=np.zeros(8, np.float32), sampling_rate=0),
        ValueError,
        "sampling_rate=0; pass",
    ),
    "integer samples": (dict(audio=np.zeros(8, np.int16), sampling_rate=RATE), ValueError, r"torch\.int16"),
    "an empty clip": (
        dict(audio=np.zeros((1, 0)), sampling_rate=RATE),
        ValueError,
        r"shape \(1, 0\); pass \[N\]",
    ),
    "clips of others": (dict(audio=np.zeros((3, 1, 8)), sampling_rate=RATE), ValueError, "3 clips.*1"),
    "stretch": (dict(stretch_in_s=0.0), ValueError, r"stretch_in_s=0\.0"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused(pipe, monkeypatch, name):
    arguments, error, message = BAD_INPUT[name]
    for part in (
        pipe.text_encoder,
        pipe.codec.encoder,
        pipe.codec.decoder,
        pipe.transformer.model.decoder.layers[0],
    ):
        monkeypatch.setattr(
            part, "forward", lambda *_, **__: pytest.fail("computed before the input was checked")
        )
    refuses(error, message, pipe, **{"prompt": PROMPT, **arguments})


def test_parts_that_do_not_fit_are_refused():
    plain = ColumnAutoregressiveSampler()
    with pytest.raises(ValueError, match="3 codebooks.*16.*2.*16"):
        AudioPipeline(tiny_decoder(), tiny_codec(target_bandwidths=[0.8]), tiny_words(), plain)
    with pytest.raises(ValueError, match="codec.*3.*8"):
        AudioPipeline(
            tiny_decoder(), tiny_codec(codebook_size=8, target_bandwidths=[0.9]), tiny_words(), plain
        )
    refuses(ValueError, r"pipe\.codec", AudioPipeline(tiny_decoder(), None, tiny_words(), plain), PROMPT)
    with pytest.raises(ValueError, match="chunk_length_s=1.0"):
        AudioPipeline(tiny_decoder(), tiny_codec(chunk_length_s=1.0, overlap=0.01), tiny_words(), plain)
    refuses(ValueError, "layout='spiral'.*parallel", tiny_audio_pipeline, pattern="spiral")
    refuses(ValueError, "layout='grouped'.*group_size", tiny_audio_pipeline, pattern="grouped")
    with pytest.raises(ValueError, match=r"layout='parallel'.*\['levels'\]"):
        tiny_audio_pipeline(pattern="parallel", pattern_settings={"levels": [0, 1]})
    refuses(ValueError, "layout='stack_delay'.*frame_order", tiny_audio_pipeline, pattern="stack_delay")
    refuses(ValueError, "padding='left'", tiny_audio_pipeline, padding="left")
    refuses(ValueError, r"max_audio_length_in_s=0\.001", tiny_audio_pipeline, max_audio_length_in_s=0.001)
    with pytest.raises(TypeError, match="EncodecModel.*MusicgenForConditionalGeneration"):
        AudioPipeline(tiny_codec(), tiny_codec(), tiny_words(), plain)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("length", [0.0, 0.001, 3601.0, 1e12, float("nan")])
def test_a_length_that_no_model_is_trained_on_is_refused(length):
    with pytest.raises(ValueError, match="3600"):
        AudioPipeline.from_musicgen(
            tiny_musicgen(2, dtype=torch.float32), tiny_tokenizer(), max_audio_length_in_s=length
        )


PROMPTS = ["a red circle", "blue"]


@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
def test_a_clip_is_drawn_with_the_published_law_and_the_padding_of_audiocraft(tmp_path, channels):
    write_musicgen(tmp_path, channels)
    encoder, tokenizer = tiny_t5(d_model=TEXT), tiny_tokenizer()
    pipe = quiet(AudioPipeline.from_audiocraft(tmp_path, encoder, tokenizer))
    assert isinstance(pipe.sampler, ColumnAutoregressiveSampler)
    assert pipe.config["max_audio_length_in_s"] == 2.0 and pipe.channels == channels
    pipe.sampler = ColumnJacobiSampler()
    output = pipe(PROMPTS, generator=seeded(1, 2), audio_length_in_s=8 * 6 / 400)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    assert not inputs["attention_mask"].all()
    with torch.no_grad():
        features = encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    condition = TextCondition(features, inputs["attention_mask"].bool())
    network, _ = load_musicgen(tmp_path, encoder)
    model = MusicgenColumnModel(network, 8, padding="zeros")
    law = TokenLaw(guidance_scale=3.0, top_k=250)
    plain = ColumnAutoregressiveSampler()(model, condition, law=law, generator=seeded(1, 2), batch_size=2)
    codes = model.codes(plain.tokens, condition)
    assert output.codes.equal(codes)
    waves = decode_codes(network.audio_encoder, codes, channels)
    assert np.abs(output.audios - waves.detach().numpy()).max() < 1e-4


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    tiny_t5(d_model=TEXT).save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    return tmp_path / "t5"


def test_convert_makes_a_folder_of_a_musicgen(tmp_path, t5):
    (tmp_path / "official").mkdir()
    official = write_musicgen(tmp_path / "official")
    facts = convert([official], tmp_path / "out", text_encoder=t5)
    assert facts["class"] == "AudioPipeline" and facts["files"] == {str(official): "MusicGen"}
    pipes = [
        load_pipeline(tmp_path / "out"),
        AudioPipeline.from_audiocraft(official, tiny_t5(d_model=TEXT), tiny_tokenizer()),
    ]
    found = []
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
        found.append(pipe(PROMPTS, generator=seeded(1, 2), audio_length_in_s=8 * 6 / 400).codes)
    assert torch.equal(*found)


def test_what_convert_cannot_make_of_audiocraft_names_the_way_out(tmp_path, t5):
    write_musicgen(tmp_path)
    for given, more, message in [
        ([tmp_path], {}, r"MusicGen.*text_encoder \(--text-encoder"),
        ([tmp_path], dict(text_encoder=t5, image_size=256), "image_size=256"),
        ([tmp_path, tmp_path / "state_dict.bin"], {}, "folder"),
        ([tmp_path / "state_dict.bin"], {}, r"state_dict\.bin"),
    ]:
        refuses(ValueError, message, convert, given, tmp_path / "out", **more)
    write_language_model(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match=r"MAGNeT.*AudioPipeline\.from_magnet"):
        convert([tmp_path], tmp_path / "out", text_encoder=t5)
    write_language_model(tmp_path, changed(MUSICGEN_SETTINGS, "lm_model", "jasco"))
    refuses(ValueError, "'jasco'", convert, [tmp_path], tmp_path / "out", text_encoder=t5)
    assert not (tmp_path / "out").exists()
