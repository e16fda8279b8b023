"""The music models that are part of the package: prompts to audio, plain and accelerated."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import EncodecModel

import visual_spec
from scripts.assemble import round_weights, share_equal_parts
from scripts.train.codec import codec_config
from tests.helpers.tiny import quiet, seeded
from visual_spec.data.tunes import NUM_SAMPLES, SAMPLE_RATE, held_out_prompts
from visual_spec.data.tunes_parser import score
from visual_spec.models.core.saved import check_folder
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.embedded import describe, embedded_folder, part_folder
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


def load() -> AudioPipeline:
    return quiet(AudioPipeline.from_pretrained("tunes"))


def test_music_decodes_plainly_by_default():
    """No sampler of the same codes is faster here (docs/results/music.md): a default that costs time helps nobody."""
    pipe = load()
    assert type(pipe.sampler) is ColumnAutoregressiveSampler and pipe.fast_sampler == pipe.plain_sampler
    with pytest.warns(UserWarning, match="keeps its ColumnAutoregressiveSampler"):
        assert type(visual_spec.accelerate(pipe).sampler) is ColumnAutoregressiveSampler


def test_accelerated_music_is_the_plain_music():
    pipe = load()
    parts = (pipe.transformer, pipe.codec, pipe.text_encoder)  # of 8 bits on disk
    assert {part.dtype for part in parts} == {torch.float32}
    pipe.to(torch.float64)  # no near-ties to make allowances for
    prompts = held_out_prompts(2, seed=11)
    pipe.sampler = ColumnAutoregressiveSampler()
    seconds = NUM_SAMPLES / SAMPLE_RATE / 2
    plain = pipe(prompts, generator=seeded(1, 2), audio_length_in_s=seconds)
    assert plain.audios.shape == (2, 1, NUM_SAMPLES // 2) and plain.sampling_rate == SAMPLE_RATE
    pipe.sampler = ColumnJacobiSampler()
    fast = pipe(prompts, generator=seeded(1, 2), audio_length_in_s=seconds)
    assert fast.codes.equal(plain.codes) and np.array_equal(fast.audios, plain.audios)
    assert (fast.trace.target_calls < plain.trace.target_calls).all()


@pytest.mark.slow
def test_plain_music_is_what_its_prompt_asks_for():
    pipe, prompts = load(), held_out_prompts(40, seed=19)  # of 12, chance alone moves the mean by 6 %
    pipe.sampler = ColumnAutoregressiveSampler()
    clips = pipe(prompts, generator=seeded(*range(40))).audios[:, 0]
    right = [np.mean(list(score(prompt, clip).values())) for prompt, clip in zip(prompts, clips, strict=True)]
    assert np.mean(right) > 0.65  # 74 % over 200 prompts


def test_shared_parts_are_counted_given_and_cast_like_own_ones():
    columns = AudioPipeline.from_pretrained("tunes")
    facts = [describe(embedded_folder(name)) for name in ("tunes", "tunes_masked")]
    for name in ("parameters", "sampling_rate"):
        one, other = (fact[name] for fact in facts)
        assert one == other or one["codec"] == other["codec"] > 1e5
    given = AudioPipeline.from_pretrained("tunes_masked", codec=columns.codec)
    assert given.codec is columns.codec
    half = AudioPipeline.from_pretrained("tunes_masked", dtype=torch.bfloat16)
    assert half.codec.dtype == half.text_encoder.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_rounded_codecs_keep_lengths_biases_and_codebooks(tmp_path):
    torch.manual_seed(0)
    codec = EncodecModel(codec_config(num_filters=4, hidden_size=16, codebook_size=16))
    quantizer: Any = codec.quantizer
    for layer in quantizer.layers:
        layer.codebook.embed.normal_()
    codec.half().save_pretrained(tmp_path)
    before = load_file(tmp_path / "model.safetensors")
    round_weights(tmp_path)
    loaded: Any = EncodecModel.from_pretrained(tmp_path, dtype=torch.float64)
    check_folder(tmp_path, EncodecModel)
    stored, read = load_file(tmp_path / "model.safetensors"), loaded.state_dict()
    assert {value.dtype for value in stored.values()} == {torch.float16, torch.float8_e4m3fn, torch.int8}
    for key, value in before.items():
        value, found = value.double(), read[key]
        if key.endswith("original1"):
            length = before[key.replace("original1", "original0")].double()
            weights = [length * v / v.square().sum((1, 2), keepdim=True).sqrt() for v in (value, found)]
            # A rounded direction is off by half a step a number: the length changes by no more than all of them do.
            step = (weights[0] / value).abs().amax((1, 2)) * value.abs().amax((1, 2)) / 127
            off = (weights[1] - weights[0]).flatten(1).norm(dim=1)
            assert (off <= 0.5 * step * value[0].numel() ** 0.5 * 1.01).all()
            assert found.abs().amax((1, 2)).eq(127).all()
        elif ".lstm.weight" in key:
            assert torch.equal(found, value.to(torch.float8_e4m3fn).double())
        else:
            assert torch.equal(found, value)


def test_only_equal_parts_are_shared(tmp_path):
    for name, codec in [("one", b"same"), ("two", b"same"), ("three", b"other")]:
        for part, content in [("codec", codec), ("text_encoder", name.encode())]:
            (tmp_path / name / part).mkdir(parents=True)
            (tmp_path / name / part / "model.safetensors").write_bytes(content)
    for name in ("two", "three"):
        share_equal_parts(tmp_path / name, tmp_path / "one")
    assert not (tmp_path / "two" / "codec").exists()
    (tmp_path / "two").rename(tmp_path / "four")
    assert (part_folder(tmp_path / "four", "codec") / "model.safetensors").read_bytes() == b"same"
    for name, part in [("four", "text_encoder"), ("three", "codec"), ("three", "text_encoder")]:
        assert part_folder(tmp_path / name, part) == tmp_path / name / part
        assert (tmp_path / name / part / "model.safetensors").exists()
