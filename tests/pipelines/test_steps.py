"""`callback_on_step_end` and `pipe._interrupt`, of every kind of pipeline."""

import io
import re
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from diffusers.callbacks import PipelineCallback

from tests.helpers.pipelines import ALL, KINDS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_masked_pipeline
from tests.helpers.tiny_audio import FRAMES, HOP
from visual_spec.models.columns.encodec import decode_codes
from visual_spec.pipelines.sampler_text import read_sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys

SCALES = ["scales", "bits"]


def tokens_of(output: Any) -> torch.Tensor:
    return output.codes if hasattr(output, "codes") else output.tokens


@pytest.mark.parametrize("name", SCALES)
def test_a_returned_canvas_is_the_picture(name):
    """As diffusers' own test: the latents of the last step are set to zero."""
    kind, last = KINDS[name], []

    def blank(pipe, step, timestep, tensors):
        last.append(step == pipe.num_timesteps - 1)
        return {"canvas": torch.zeros_like(tensors["canvas"])} if last[-1] else tensors

    pipe = kind.make()
    output = kind.ask(pipe, output_type="latent", callback_on_step_end=blank)
    assert last[-1] and not any(last[:-1]) and not output.images.any()
    # What is returned as it was changes nothing.
    plain, same = (
        kind.ask(pipe, seed=3, callback_on_step_end=callback) for callback in (None, lambda *given: given[3])
    )
    assert torch.equal(plain.images, same.images) and torch.equal(plain.tokens, same.tokens)


def test_later_scales_go_on_from_a_returned_canvas():
    kind = KINDS["scales"]
    pipe, seen = kind.make(), []

    def change(pipe, step, timestep, tensors):
        seen.append(tensors["canvas"].clone())
        return {"canvas": -2 * tensors["canvas"]} if step == 0 else None

    law = dict(guidance_scale=1.0, top_k=0, top_p=1.0)
    output = kind.ask(pipe, seed=5, output_type="latent", callback_on_step_end=change, **law)
    tokenizer, model = pipe.vq_model, pipe.transformer
    changed = -2 * seen[0]
    state = model.prefill(
        torch.tensor([kind.asked]), batch_size=1, guided=False, maps=[tokenizer.next_map(changed, 1)]
    )
    slots = torch.arange(1, 5)[None]
    noise = CounterNoise(draw_keys(seeded(5), 1), state.logits.device)
    want = noise.categorical(TokenLaw()(state.logits, False), slots, TOKEN)
    assert torch.equal(output.tokens[:, 1:5], want)
    assert torch.equal(seen[1], tokenizer.accumulate(changed, 1, want))
    canvas = changed
    for scale, part in enumerate(output.tokens[:, 1:].split([4, 9, 16], 1), 1):
        canvas = tokenizer.accumulate(canvas, scale, part)
    assert torch.equal(output.images, canvas)


@pytest.mark.every_set
@pytest.mark.parametrize("name", [name for name in ALL if "music" not in name and name != "chunks"])
def test_a_callback_sees_the_tokens_so_far(name):
    """Those that the whole decode has committed by then, of which pictures can be made; 0 where none is."""
    kind, seen = ALL[name], []
    pipe = kind.make()
    whole = kind.ask(pipe, seed=2)
    asked: dict[str, Any] = dict(callback_on_step_end_tensor_inputs=["tokens"])
    kind.ask(pipe, seed=2, callback_on_step_end=lambda *told: seen.append(told[1:]), **asked)
    for step, timestep, tensors in seen:
        if pipe.unit == "scales":
            want = whole.tokens[:, :timestep]
        else:
            is_open = whole.trace.commit_call > step
            want = whole.tokens.masked_fill(is_open[(...,) + (None,) * (whole.tokens.dim() - 2)], 0)
        assert set(tensors) == {"tokens"} and torch.equal(tensors["tokens"], want)
    shown = pipe.decode_tokens(seen[-1][2]["tokens"], "pt")
    assert torch.equal(shown, whole.frames if pipe.medium == "video" else whole.images)
    with pytest.raises(ValueError, match="changed tokens"):
        kind.ask(pipe, callback_on_step_end=lambda *told: {"tokens": told[3]["tokens"] + 1}, **asked)


@pytest.mark.parametrize("name", KINDS)
def test_a_callback_and_the_bar_see_every_call(name):
    """With the fast sampler where there is one, which commits other numbers of tokens for each sample."""
    kind, seen, shown = KINDS[name], [], io.StringIO()
    pipe: Any = kind.make()
    pipe.sampler = read_sampler(pipe.fast_sampler)
    pipe.set_progress_bar_config(disable=False, file=shown, mininterval=0)
    settings: dict[str, Any] = {"generator": seeded(1, 2), kind.each: 2}
    trace = pipe(kind.asked, callback_on_step_end=lambda *told: seen.append(told), **settings).trace
    assert all(told[0] is pipe for told in seen)
    assert [told[1] for told in seen] == list(range(int(trace.target_calls.max())))
    own = pipe._callback_tensor_inputs[0]
    assert all(set(told[3]) == {own} for told in seen)
    if own == "lengths":
        assert all(told[2] == min(told[3]["lengths"].tolist()) for told in seen)
    total = trace.commit_call.numel()
    last = "4 of 4 scales" if name in SCALES else f"{total / 2 / len(seen):.2f} {pipe.unit} per call"
    assert f"{total}/{total}" in shown.getvalue() and last in shown.getvalue()
    silent: list[Any] = []
    kind.ask(
        pipe, callback_on_step_end=lambda *told: silent.append(told[3]), callback_on_step_end_tensor_inputs=[]
    )
    assert silent[-1] == {}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_callback_asks_for_and_returns_is_checked(name):
    kind = KINDS[name]
    pipe = kind.make()
    own = pipe._callback_tensor_inputs[0]
    allowed = re.escape(str([own] if pipe.medium == "audio" else [own, "tokens"]))
    with pytest.raises(ValueError, match=rf"holds \['latents'\]; allowed are {allowed}"):
        kind.ask(pipe, callback_on_step_end_tensor_inputs=["latents"])

    class Official(PipelineCallback):
        tensor_inputs: Any = ["latents"]  # pyright: ignore[reportIncompatibleVariableOverride]

        def callback_fn(self, pipeline, step_index, timestep, callback_kwargs):
            return callback_kwargs

    official: Any = Official
    refuses(ValueError, r"holds \['latents'\]", kind.ask, pipe, callback_on_step_end=official(None, 1))
    official.tensor_inputs = [own]
    kind.ask(pipe, callback_on_step_end=official(None, 1))
    refuses(TypeError, "int.*dictionary", kind.ask, pipe, callback_on_step_end=lambda *given: 1)
    with pytest.raises(ValueError, match=f"returned {own} .*torch.float64"):
        kind.ask(pipe, callback_on_step_end=lambda *given: {own: torch.zeros(7, dtype=torch.float64)})
    if own == "lengths":
        with pytest.raises(ValueError, match="changed lengths"):
            kind.ask(pipe, callback_on_step_end=lambda *given: {own: given[3][own] + 1})
        kind.ask(pipe, callback_on_step_end=lambda *given: {own: given[3][own].clone()})


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_call_returns_what_is_there(name):
    kind = KINDS[name]
    pipe, calls = kind.make(), []
    whole = kind.ask(pipe, seed=2)
    assert not whole.trace.stopped

    def stop(pipe, step, timestep, tensors):
        calls.append((step, timestep))
        pipe._interrupt = step == 2

    output = kind.ask(pipe, seed=2, callback_on_step_end=stop)
    assert [step for step, _ in calls] == [0, 1, 2] and pipe.interrupt
    trace, got, want = output.trace, tokens_of(output), tokens_of(whole)
    assert trace.stopped and "stopped early" in trace.summary()
    there, committed = calls[-1][1], trace.commit_call >= 0
    if name in SCALES:
        assert got.shape == (1, there) and torch.equal(got, want[:, :there])
        assert output.images.shape == whole.images.shape
        assert sum(trace.model_calls) == 3
        if name == "scales":  # the picture is that of the scales so far
            assert torch.equal(pipe.decode_tokens(got, "pt"), output.images)
    elif name == "masked music":
        assert got.shape == (1, 3, 0) and output.audios.shape == (1, 1, 0)
    elif name == "music":
        assert committed.sum() == there == 3 and trace.tokens_per_call.tolist() == [1]
        assert got.shape == (1, 3, 1)  # the codes of a frame are complete after three steps
        assert torch.equal(got, want[..., :1]) and output.audios.shape[-1] == HOP
        assert torch.allclose(output.audios, decode_codes(pipe.codec, got), atol=1e-6)
    else:
        made = "frames" if name == "video" else "images"
        assert committed.sum() == there < want.numel()
        assert getattr(output, made).shape == getattr(whole, made).shape
        assert there == 3 or name.startswith("masked")  # whose calls keep several tokens
        assert torch.equal(got[committed], want[committed])
    again = kind.ask(pipe, seed=2)
    assert torch.equal(tokens_of(again), want) and not pipe.interrupt


@pytest.mark.parametrize("frames", [4, 7])
def test_waves_of_an_interrupted_clip_are_those_of_its_codes(frames):
    """Whether or not the last stretch was decoded before the interruption, and over several windows."""
    kind = KINDS["music"]
    pipe, heard = kind.make(), []

    def stop(pipe, step, timestep, tensors):
        pipe._interrupt = timestep == FRAMES + 2 + frames + 2

    output = kind.ask(
        pipe,
        audio_length_in_s=0.3,
        extend_stride_in_s=0.1,
        stretch_in_s=0.04,
        callback_on_step_end=stop,
        callback_on_audio=lambda pipe, start, waves: heard.append(waves),
    )
    assert output.codes.shape[-1] == FRAMES + frames and output.audios.shape[-1] == HOP * (FRAMES + frames)
    assert torch.allclose(output.audios, decode_codes(pipe.codec, output.codes), atol=1e-5)
    assert torch.equal(torch.cat(heard, -1), output.audios)
    assert output.trace.commit_call.max() + 1 == output.trace.target_calls[0]


def test_an_interruption_at_the_end_is_none():
    for name in ("captions", "scales", "masked music"):
        kind = KINDS[name]
        pipe = kind.make()
        last = len(kind.ask(pipe).trace.commit_call.unique()) - 1
        if name == "masked music":
            last = 7

        def stop(pipe, step, timestep, tensors, last=last):
            pipe._interrupt = step == last

        assert not kind.ask(pipe, callback_on_step_end=stop).trace.stopped


def test_the_bar_counts_calls_and_no_known_tokens():
    pipe = tiny_masked_pipeline()
    seen = []

    class Bar(tqdm.tqdm):
        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            seen.append((self.total, s))
            super().set_postfix_str(s, refresh)

    pipe.progress_bar = lambda total: Bar(total=total, file=io.StringIO())
    mask = np.zeros((8, 8), np.float32)
    mask[:, 4:] = 1  # 8 of 16 tokens
    content = np.zeros((8, 8, 3), np.uint8)
    calls = int(pipe("a red circle", image=content, mask=mask).trace.target_calls[0])
    assert {total for total, _ in seen} == {8}
    assert seen[-1][1] == f"{calls} calls, {8 / calls:.2f} tokens per call"
    assert float(seen[0][1].split()[2]) < 8
