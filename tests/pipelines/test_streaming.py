"""Samples that are looked at while they grow: what they show, what they end with, and that they stop."""

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.pipelines import KINDS, Kind
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PICTURES = {name: kind for name, kind in KINDS.items() if "music" not in name}
PICTURES |= {name: Kind(lambda name=name: tiny_latent_pipeline(name), 1) for name in ("mar", "causal")}


def streamed(kind: Kind, pipe: Any, **settings: Any) -> list[Any]:
    settings = {"output_type": "pt", **kind.settings, **settings}
    return list(pipe.stream(kind.asked, generator=seeded(3), **settings))


def pixels(output: Any) -> Any:
    return output.to_tuple()[0]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_grows_and_ends_as_the_call_draws_it(name: str) -> None:
    kind = PICTURES[name]
    pipe = kind.make()
    whole = kind.ask(pipe, seed=3)
    calls = int(whole.trace.target_calls.max())
    outputs = streamed(kind, pipe)
    assert len(outputs) >= calls > 1
    assert torch.equal(pixels(outputs[-1]), pixels(whole)) and torch.equal(outputs[-1].tokens, whole.tokens)
    counts = [int((output.trace.commit_call >= 0).sum()) for output in outputs]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    for output in outputs:
        assert pixels(output).shape == pixels(whole).shape
    # What is committed stays: open tokens are the only grey ones.
    if name not in ("scales", "bits"):
        for output in outputs[:-1]:
            done = output.trace.commit_call >= 0
            assert torch.equal(output.tokens[done], whole.tokens[done])
            side = round(done.shape[1] ** 0.5) if name != "video" else None
            if side is not None:
                patch = pixels(whole).shape[-1] // side
                squares = done.reshape(-1, side, side).repeat_interleave(patch, 1).repeat_interleave(patch, 2)
                grey = (pixels(output) == 0.5).all(1)
                assert torch.equal(grey | squares, torch.ones_like(grey)) and not (grey & squares).all()


@pytest.mark.parametrize("output_type", ["pil", "np", "latent"])
@pytest.mark.parametrize("name", ["captions", "video"])
def test_forms(name: str, output_type: str) -> None:
    kind = PICTURES[name]
    pipe = kind.make()
    first, *_, last = streamed(kind, pipe, output_type=output_type)
    here, there = (np.asarray(pixels(output)) for output in (first, last))
    assert (
        type(pixels(first)) is type(pixels(last)) and here.shape == there.shape and here.dtype == there.dtype
    )
    assert not np.array_equal(here, there)


def test_every_and_identical_samplers() -> None:
    pipe = tiny_pipeline(AutoregressiveSampler())
    prompts = ["a red circle", "a blue square"]
    plain = list(pipe.stream(prompts, generator=seeded(1, 2), every=5, output_type="pt"))
    assert [int((output.trace.commit_call[0] >= 0).sum()) for output in plain] == [5, 10, 15, 16]
    pipe.sampler = SpeculativeJacobiSampler(window=4)
    fast = list(pipe.stream(prompts, generator=seeded(1, 2), output_type="pt"))
    assert torch.equal(fast[-1].images, plain[-1].images)
    ended = fast[-1].trace.target_calls
    # A sample that left the batch stays whole.
    assert ended[0] != ended[1] or len(fast) == int(ended.max()) + 1


def test_music_is_heard_stretch_by_stretch() -> None:
    pipe = tiny_audio_pipeline()
    stretch = 2 / pipe.frame_rate
    *parts, last = pipe.stream("a slow sad organ", generator=seeded(3), stretch_in_s=stretch)
    whole = pipe("a slow sad organ", generator=seeded(3), stretch_in_s=stretch)
    assert len(parts) > 1 and np.array_equal(last.audios, whole.audios)
    lengths = [part.audios.shape[-1] for part in parts]
    assert lengths == sorted(set(lengths)) and parts[0].trace is None
    for part in parts:
        assert np.array_equal(part.audios, whole.audios[..., : part.audios.shape[-1]])


def test_a_consumer_that_stops_ends_the_call() -> None:
    pipe = tiny_pipeline(AutoregressiveSampler())
    calls = []
    real = pipe.transformer.forward
    pipe.transformer.forward = lambda *args, **kwargs: calls.append(0) or real(*args, **kwargs)
    before = threading.active_count()
    growing = pipe.stream("a red circle", generator=seeded(1))
    next(growing)
    growing.close()
    assert threading.active_count() == before and len(calls) < 8
    pipe.transformer.forward = real
    assert len(list(pipe.stream("a red circle", generator=seeded(1), every=4))) == 5


@pytest.mark.parametrize("name", ["captions", "masked captions"])
def test_a_stream_is_the_call_under_what_pytorch_keeps_for_each_thread(name: str) -> None:
    kind = KINDS[name]
    pipe = kind.make()
    plain = kind.ask(pipe, seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        called, last = kind.ask(pipe, seed=3), streamed(kind, pipe)[-1]
    assert torch.equal(pixels(last), pixels(called)) and not torch.equal(pixels(called), pixels(plain))
    with torch.inference_mode():
        assert streamed(kind, pipe)[-1].tokens.is_inference()


def test_a_program_may_end_while_it_holds_a_stream() -> None:
    program = """
import torch
from tests.helpers.tiny import tiny_pipeline
stream = tiny_pipeline().stream("a red circle")
next(stream)
print("held")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout == "held\n" and "Traceback" not in ran.stderr


def test_errors_come_to_the_consumer() -> None:
    pipe = tiny_pipeline(AutoregressiveSampler())
    refuses(ValueError, "every=0", pipe.stream, "a red circle", every=0)
    with pytest.raises(ValueError, match="temperature=-1"):
        pipe.stream("a red circle", temperature=-1.0)  # before it is read
    for weight in pipe.transformer.parameters():
        weight.data.fill_(torch.nan)
    refuses(FloatingPointError, "slot 0", list, pipe.stream("a red circle"))
