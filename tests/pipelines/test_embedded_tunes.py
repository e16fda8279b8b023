"""The music model that is part of the package: prompts to audio, plain and accelerated."""

import numpy as np
import pytest
import torch

from visual_spec.data.tunes import NUM_SAMPLES, SAMPLE_RATE, held_out_prompts
from visual_spec.data.tunes_parser import score
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.samplers.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.columns_jacobi import ColumnJacobiSampler


def load() -> AudioPipeline:
    pipe = AudioPipeline.from_pretrained("tunes")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_accelerated_music_is_the_plain_music():
    pipe = load()
    assert {part.dtype for part in (pipe.transformer, pipe.codec, pipe.text_encoder)} == {torch.float32}
    pipe.to(torch.float64)  # no near-ties to make allowances for
    prompts = held_out_prompts(2, seed=11)
    pipe.sampler = ColumnAutoregressiveSampler()
    plain = pipe(prompts, generator=seeded(1, 2))
    pipe.sampler = ColumnJacobiSampler()
    fast = pipe(prompts, generator=seeded(1, 2))
    assert fast.codes.equal(plain.codes) and np.array_equal(fast.audios, plain.audios)
    assert fast.audios.shape == (2, 1, NUM_SAMPLES) and fast.sampling_rate == SAMPLE_RATE
    assert (fast.trace.target_calls < plain.trace.target_calls).all()


def test_streamed_music_is_the_music():
    pipe, heard = load(), []
    out = pipe(
        "a slow sad organ melody in A minor",
        audio_length_in_s=5.0,
        extend_stride_in_s=2.0,
        generator=seeded(3),
        callback_on_audio=lambda _, start, waves: heard.append(waves),
    )
    assert np.array_equal(torch.cat(heard, -1).numpy(), out.audios) and len(heard) > 5
    assert 0.01 < np.abs(out.audios).max() < 2


@pytest.mark.slow
def test_tunes_are_of_their_own_prompt_rather_than_another():
    pipe, prompts = load(), held_out_prompts(12, seed=13)
    clips = pipe(prompts, generator=seeded(*range(12))).audios[:, 0]
    own, other = (
        np.mean(
            [np.mean(list(score(prompt, clip).values())) for prompt, clip in zip(prompts, heard, strict=True)]
        )
        for heard in (clips, np.roll(clips, 1, 0))
    )
    assert own > other + 0.1
