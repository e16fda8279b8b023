"""Clips of any length from prompts, by a tiny causal Wan: against the loop itself, by policy, saved, and refused."""

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import visual_spec
from scripts.train.causal_video import new_model
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet
from visual_spec import cli
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import Full, Sliding
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw

PROMPT = "a small red star moves right quickly and bounces on a plain sky background, camera still"


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    transformer, encoder = new_model(24, 1, 2)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape)
    return quiet(ChunkVideoPipeline(transformer.eval(), encoder.eval(), ChunkWiseSampler(chunk=2, shift=3.0)))


def seeds(*numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


def test_clips_are_those_of_the_loop_made_large(pipe):
    drawn = pipe([PROMPT] * 2, num_frames=6, generator=seeds(1, 2), output_type="np")
    causal = CausalWan(pipe.transformer, Full())
    embeds = pipe.text_encoder([PROMPT] * 2).features.detach()
    size: Any = dict(num_frames=6, height=16, width=16)
    sampler = ChunkWiseSampler(2, (1000, 750, 500, 250), 3.0)
    latents = sampler(causal, embeds, law=TokenLaw(), generator=seeds(1, 2), batch_size=2, **size).tokens
    causal.release()
    assert torch.equal(drawn.latents, latents)
    large = F.interpolate(latents[1].transpose(0, 1), (64, 64), mode="bicubic").clamp(-1, 1) / 2 + 0.5
    assert np.allclose(drawn.frames[1], large.permute(0, 2, 3, 1), atol=1e-6) and drawn.frames.shape[1] == 6
    assert drawn.trace.target_calls.tolist() == [15, 15] and pipe.last_trace is drawn.trace
    alone = pipe(PROMPT, num_frames=6, generator=seeds(2), steps=(1000, 750, 500, 250), policy=Full())
    assert (alone.latents[0] - latents[1]).abs().max() < 1e-4


def test_a_policy_bounds_the_cache_and_leaves_the_transformer_as_it_was(pipe):
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    full = pipe(PROMPT, num_frames=24, generator=seeds(1))
    short = pipe(PROMPT, num_frames=24, generator=seeds(1), policy="sliding:window=8")
    sizes = short.trace.cache_bytes
    assert len(set(sizes[4:])) == 1 and full.trace.cache_bytes[-1] > 2.9 * sizes[-1]
    # As long as nothing was forgotten, the clips are one.
    assert torch.equal(full.latents[:, :, :8], short.latents[:, :, :8])
    assert (full.latents[:, :, 8:] - short.latents[:, :, 8:]).abs().max() > 1e-3
    same = pipe(PROMPT, num_frames=24, generator=seeds(1), policy=Sliding(8))
    assert torch.equal(same.latents, short.latents)
    refuses(ValueError, "window", pipe, PROMPT, policy="sliding:window=1")
    assert [block.attn1.processor for block in pipe.transformer.blocks] == processors


def test_the_bar_counts_frames_and_chunks(pipe):
    shown = io.StringIO()
    pipe.set_progress_bar_config(disable=False, file=shown, mininterval=0)
    pipe(PROMPT, num_frames=4, steps=1)
    pipe.set_progress_bar_config(disable=True)
    assert "4/4" in shown.getvalue() and " frames/s, 1 chunk]" in shown.getvalue()
    assert "2 chunks]" in shown.getvalue()


def test_what_it_returns(pipe, tmp_path):
    drawn = pipe([PROMPT, PROMPT], num_videos_per_prompt=2, num_frames=2, steps=1)
    assert [len(clip) for clip in drawn.frames] == [2] * 4 and drawn.frames[0][0].size == (64, 64)
    assert drawn.save(tmp_path / "sheet.png").stat().st_size > 0
    latents = pipe(PROMPT, num_frames=2, steps=1, output_type="latent")
    assert latents.frames is latents.latents and latents.frames.shape == (1, 3, 2, 16, 16)
    refuses(ValueError, "latents", latents.save, tmp_path / "clip.png")
    frames, values, trace, rate = pipe(PROMPT, steps=1, return_dict=False, output_type="pt")
    assert frames.shape == (1, 8, 3, 64, 64) and values.shape[2] == 8 and rate == 8.0 and trace.seconds > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_frames": 7}, "pass 6 or 8"),
        ({"num_frames": 0}, "num_frames"),
        ({"policy": "none"}, "unknown.*'none'"),
        ({"policy": "sliding:frames=3"}, "sliding.*frames"),
        ({"steps": 0}, "steps"),
        ({"steps": (500, 750)}, "fall"),
        ({"shift": 0.0}, "shift"),
        ({"prompt": "?"}, "no words"),
    ],
)
def test_bad_input_is_refused_before_any_call(pipe, monkeypatch, given, says):
    monkeypatch.setattr(pipe.transformer, "forward", lambda *arguments, **more: pytest.fail("it computed"))
    refuses(ValueError, says, pipe, **{"prompt": PROMPT} | given)


def test_what_is_no_policy_or_no_sampler_is_refused(pipe):
    refuses(TypeError, "int.*Full", pipe, PROMPT, policy=3)
    before = pipe.sampler
    assert visual_spec.accelerate(pipe).sampler is before
    with pytest.warns(UserWarning, match="does not know 'dog'"):
        pipe(PROMPT.replace("star", "dog"), num_frames=2, steps=1)
    other, encoder = new_model(24, 1, 2)
    other.register_to_config(in_channels=4)
    refuses(ValueError, "4 channels", ChunkVideoPipeline, other, encoder)


def test_the_sampler_says_how_chunks_are_drawn(pipe, tmp_path):
    request: dict[str, Any] = dict(prompt=PROMPT, num_frames=4, generator=seeds(1))
    want = pipe(**request, steps=(1000, 300), shift=2.0).latents
    pipe.sampler = ChunkWiseSampler(2, (1000, 300), 2.0)
    pipe.save_pretrained(tmp_path)
    for one in (pipe, ChunkVideoPipeline.from_pretrained(tmp_path)):
        assert torch.equal(quiet(one)(**request | dict(generator=seeds(1))).latents, want)
    # As earlier versions saved it.
    index = json.loads((tmp_path / "model_index.json").read_text())
    del index["sampler"]
    index |= {"chunk": 1, "default_steps": 2, "default_shift": 4.0}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    former = ChunkVideoPipeline.from_pretrained(tmp_path).sampler.config
    assert (former["chunk"], former["steps"], former["shift"]) == (1, 2, 4.0)


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_commands_that_measure_refuse_it(pipe, tmp_path, capsys, command):
    pipe.save_pretrained(tmp_path / "model")
    assert cli.main([command, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 2
    assert "chunk" in capsys.readouterr().err.lower()


@pytest.mark.parametrize("output_type", ["pt", "np", "pil", "latent"])
def test_a_clip_grows_chunk_by_chunk(pipe, output_type):
    request = dict(num_frames=6, generator=seeds(1), output_type=output_type)
    outputs = list(pipe.stream(PROMPT, **request))
    whole = pipe(PROMPT, **request | dict(generator=seeds(1)))
    assert torch.equal(outputs[-1].latents, whole.latents) and len(outputs) == 3 + 1
    for chunks, output in enumerate(outputs[:-1], 1):
        known = 2 * chunks
        assert torch.equal(output.latents, whole.latents[:, :, :known])
        assert (output.trace.commit_call >= 0).sum() == known
        if output_type in ("pt", "np"):
            assert output.frames.shape == whole.frames.shape and type(output.frames) is type(whole.frames)
            assert (output.frames[:, :known] == whole.frames[:, :known]).all()
            assert (output.frames[:, known:] == 0.5).all()
        if output_type == "pil":
            assert len(output.frames[0]) == 6 and output.frames[0][0] == whole.frames[0][0]
