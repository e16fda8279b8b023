"""MaskGCT's pipeline: phones to waves, stage by stage, saved, converted, and bad input."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import SeamlessM4TFeatureExtractor

from tests.helpers.maskgct import (
    given_prompt,
    maskgct_pipeline,
    random_codes,
    speech_encoder,
    write_official,
)
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.models.masked.maskgct_straight import BOOKS, CODES, HEADS, PHONES
from visual_spec.models.masked.maskgct import (
    AcousticCondition,
    AcousticDecoder,
    SemanticCondition,
    SemanticDecoder,
)
from visual_spec.pipelines import convert_maskgct
from visual_spec.pipelines.convert import convert
from visual_spec.pipelines.loading import load_pipeline, read_facts
from visual_spec.pipelines.maskgct import MaskgctPipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler

PHONE_IDS, BEFORE = [[1, 2, 3, 4, 5, 6], [3, 0, 8]], [2, 7, 1]


@pytest.fixture(scope="module")
def official(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("MaskGCT")
    write_official(folder)
    return folder


@pytest.fixture
def pipe(official) -> MaskgctPipeline:
    return maskgct_pipeline(official)


def test_speech_is_both_stages_and_the_codec(pipe):
    prompt = given_prompt()
    heard: list[tuple[int, int]] = []

    def listen(pipe, step, timestep, kwargs):
        heard.append((step, timestep))

    output = pipe(
        PHONE_IDS, BEFORE, **prompt, audio_length_in_s=[20 / 4000, 13 / 4000], guidance_scale=2.0,
        generator=seeded(1, 2), callback_on_step_end=listen,
    )  # fmt: skip
    assert [step for step, _ in heard] == list(range(3 + 3 + 2 + 1)) and pipe.num_timesteps == 3 + 3 + 2 + 1
    assert output.lengths == [19, 12] and output.codes.shape == (2, BOOKS, 19)
    for row, length in enumerate([20, 13]):
        phones = torch.tensor(BEFORE + PHONE_IDS[row])
        told = SemanticCondition([phones], [prompt["prompt_semantic"]], [length], 2.0)
        generator = seeded(1 + row)
        semantic = pipe.sampler(
            SemanticDecoder(pipe.semantic, length), told, law=TokenLaw(temperature=0.9, top_k=6), batch_size=1,
            generator=generator,
        )  # fmt: skip
        assert torch.equal(output.semantic_codes[row, :length], semantic.tokens[0])
        whole = torch.cat([prompt["prompt_semantic"], semantic.tokens[0]])
        sounds = AcousticCondition([whole], [prompt["prompt_acoustic"]], 2.0)
        acoustic = pipe.acoustic_sampler(
            AcousticDecoder(pipe.acoustic_first, pipe.acoustic_rest, length - 1), sounds,
            law=TokenLaw(temperature=1.5, top_k=5), batch_size=1, generator=generator,
        )  # fmt: skip
        assert torch.equal(output.codes[row, :, : length - 1], acoustic.tokens[0].T)
        wave = pipe.codec.decode(acoustic.tokens.transpose(1, 2))[0, 0].numpy()
        np.testing.assert_allclose(output.audios[row, 0, : len(wave)], wave, atol=1e-6)
        assert (output.audios[row, 0, len(wave) :] == 0).all()


def test_a_file_ends_with_the_clip(pipe, tmp_path):
    output = pipe(PHONE_IDS, BEFORE, **given_prompt(), audio_length_in_s=[20 / 4000, 13 / 4000])
    import wave

    for index, length in enumerate(output.lengths):
        with wave.open(str(output.save(tmp_path / f"{index}.wav", index))) as file:
            assert file.getnframes() == 6 * length


def test_a_clip_is_what_its_codes_are(pipe):
    wave = 0.1 * torch.randn(1600, generator=torch.Generator().manual_seed(3))
    pipe.codec.register_to_config(sampling_rate=16_000)
    semantic, acoustic = pipe.encode_clip(wave, 16_000)
    extract = SeamlessM4TFeatureExtractor(padding_value=1.0)
    inputs = extract(wave.numpy(), sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        features = pipe.speech_encoder(**inputs, output_hidden_states=True).hidden_states[1]
    assert torch.equal(semantic, pipe.semantic_codec.encode(features)[0])
    assert torch.equal(acoustic, pipe.codec.encode(wave[None, None])[0].T)
    seconds = (len(acoustic) - len(semantic) + 5) / pipe.frame_rate + 1e-6
    one, two = (
        pipe(
            PHONE_IDS[0],
            BEFORE,
            generator=seeded(4)[0],
            output_type="latent",
            audio_length_in_s=seconds,
            **prompt,
        )
        for prompt in (
            {"prompt_audio": wave, "sampling_rate": 16_000},
            {"prompt_semantic": semantic, "prompt_acoustic": acoustic},
        )
    )
    assert torch.equal(one.codes, two.codes) and one.lengths == [5]


def test_without_a_length_phones_are_as_long_as_in_the_prompt(pipe):
    output = pipe(PHONE_IDS, BEFORE, **given_prompt(), output_type="latent")
    # 7 codes for 3 phones, less the frame by which the acoustic prompt is longer.
    assert output.lengths == [7 * 6 // 3 - 1, 7 * 3 // 3 - 1]


def test_it_is_not_streamed(pipe):
    with pytest.raises(TypeError, match="MaskgctPipeline"):
        next(pipe.stream(PHONE_IDS, BEFORE, **given_prompt()))


def test_an_interrupted_call_says_nothing(pipe):
    def stop(pipe, step, timestep, kwargs):
        pipe._interrupt = step == 4

    output = pipe(PHONE_IDS, BEFORE, **given_prompt(), audio_length_in_s=0.005, callback_on_step_end=stop)
    assert (
        output.lengths == [0, 0] and output.audios.shape == (2, 1, 0) and output.codes.shape == (2, BOOKS, 0)
    )
    assert output.acoustic_trace.stopped and not output.trace.stopped


def test_it_is_saved_and_loaded(pipe, tmp_path):
    request: dict[str, Any] = dict(**given_prompt(), audio_length_in_s=0.004, output_type="latent")
    expected = pipe(PHONE_IDS, BEFORE, generator=seeded(1, 2), **request).codes
    pipe.save_pretrained(tmp_path)
    assert read_facts(tmp_path) == pipe.facts and pipe.facts.calls == ("masked",)
    loaded = quiet(load_pipeline(tmp_path))
    assert type(loaded) is MaskgctPipeline and loaded.semantic_codec.config["feature_layer"] == 1
    assert torch.equal(loaded(PHONE_IDS, BEFORE, generator=seeded(1, 2), **request).codes, expected)


def test_official_files_are_converted(official, tmp_path, monkeypatch):
    # Heads cannot be read off the weights.
    monkeypatch.setattr(convert_maskgct, "load_parts", partial(convert_maskgct.load_parts, num_heads=HEADS))
    files = sorted(official.rglob("*.safetensors"))
    report = convert([*files, official / "stats.pt"], tmp_path / "all")
    assert report["class"] == "MaskgctPipeline" and len(report["files"]) == 7
    assert report["parameters"]["semantic"] > 0 and "semantic_codec" in report["parameters"]
    pair = [official / "acoustic_codec" / f"{name}.safetensors" for name in ("model_1", "model")]
    assert convert(pair, tmp_path / "codec")["class"] == "AcousticCodec"
    refuses(ValueError, "encoder.*decoder.*both", convert, pair[:1], tmp_path / "half")
    with pytest.raises(ValueError, match="lack.*acoustic encoder"):
        convert(
            [files[-1], official / "semantic_codec" / "model.safetensors", official / "stats.pt"],
            tmp_path / "no",
        )
    refuses(
        ValueError,
        "text_encoder=t5 given for .*of MaskGCT",
        convert,
        files,
        tmp_path / "text",
        text_encoder="t5",
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"phones": "hello"}, "phone ids"),
        ({"phones": ["hello", "you"]}, "phone ids"),
        ({"phones": [[PHONES]]}, f"from 0 to {PHONES - 1}"),
        ({"phones": [[]]}, "phones"),
        ({"prompt_phones": [[1], [2], [3]]}, "3 prompt_phones.*2"),
        ({"prompt_semantic": None}, "prompt_audio.*prompt_semantic"),
        ({"prompt_acoustic": random_codes(2, 8, 2)}, "acoustic ones \\[P, 3\\]"),
        ({"prompt_acoustic": torch.full((8, BOOKS), CODES)}, f"0 to {CODES - 1}"),
        ({"audio_length_in_s": 0.0}, "pass 2 to 4089"),
        ({"audio_length_in_s": [0.01]}, "1 lengths.*2"),
        ({"output_type": "pil"}, "output_type='pil'"),
        ({"top_k": -1}, "top_k=-1"),
        ({"generator": seeded(1)}, "1 generators.*2"),
    ],
)
def test_bad_input_is_refused_before_anything_is_decoded(pipe, monkeypatch, changes, message):
    monkeypatch.setattr(SemanticDecoder, "prepare", None)
    request: dict[str, Any] = {"phones": PHONE_IDS, "prompt_phones": BEFORE, **given_prompt()}
    refuses(ValueError, message, pipe, **request | changes)


def test_samplers_and_components_that_do_not_fit_are_refused(pipe, official):
    pipe.acoustic_sampler = MaskedSampler(steps=(3, 2))
    refuses(ValueError, "2 codebooks.*3", pipe, PHONE_IDS, BEFORE, **given_prompt(), audio_length_in_s=0.005)
    pipe.semantic_codec = None
    with pytest.raises(ValueError, match="speech_encoder.*semantic_codec"):
        pipe(PHONE_IDS, BEFORE, prompt_audio=torch.zeros(1600), sampling_rate=16_000)
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    with pytest.raises(ValueError, match="1 codebooks|3 codebooks.*acoustic_rest"):
        MaskgctPipeline(**parts | {"acoustic_rest": pipe.acoustic_first})
    with pytest.raises(ValueError, match="speech_encoder"):
        MaskgctPipeline.from_official(official, speech_encoder(), num_heads=HEADS)


def test_both_stages_keep_log_probabilities(pipe):
    asked: dict[str, Any] = dict(
        **given_prompt(), audio_length_in_s=[20 / 4000, 13 / 4000], output_type="latent"
    )
    plain = pipe(PHONE_IDS, BEFORE, **asked, generator=seeded(1, 2))
    output = pipe(PHONE_IDS, BEFORE, **asked, generator=seeded(1, 2), output_logprobs=True)
    assert torch.equal(output.codes, plain.codes) and plain.trace.logprobs is None
    for trace in (output.trace, output.acoustic_trace):
        drawn = (trace.entry_call >= 0).view(trace.logprobs.shape)
        for values in (trace.logprobs, trace.model_logprobs):
            assert (values[drawn] <= 0).all() and values[~drawn].isnan().all() and bool((~drawn).any())
    assert output.trace.logprobs.shape == output.semantic_codes.shape
    assert output.acoustic_trace.logprobs.shape == output.codes.transpose(1, 2).shape
