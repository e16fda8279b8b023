"""`VideoPipeline` with a model that draws the tokens of a frame in parallel: clips, files, the command line."""

from typing import Any

import pytest
import torch

from tests.helpers.command import last_line
from tests.helpers.tiny import seeded, tiny_frame_pipeline, tiny_frame_transformer, tiny_vq_model
from visual_spec import FrameMaskedSampler, VideoPipeline, cli
from visual_spec.pipelines.loading import read_facts

PROMPT = "a red circle"


def test_a_clip_equals_the_samplers_own():
    pipe = tiny_frame_pipeline()
    found: Any = pipe([PROMPT, "a blue square"], generator=seeded(1, 2), output_type="latent")
    assert found.frames.shape == (2, 3, 2, 2) and found.trace.frame_calls.tolist() == [4, 4, 3]
    own = FrameMaskedSampler(3, 0.5)(
        pipe.transformer, pipe.make_condition([PROMPT, "a blue square"]), law=pipe.make_law(),
        generator=seeded(1, 2), batch_size=2,
    )  # fmt: skip
    assert torch.equal(own.tokens, found.tokens)
    alone = pipe("a blue square", generator=seeded(2), output_type="latent")
    assert torch.equal(alone.tokens[0], found.tokens[1])
    shown = pipe(PROMPT, generator=seeded(1), output_type="pt").frames
    assert shown.shape == (1, 3, 3, 4, 4)


@pytest.mark.parametrize("count", [1, 2])
def test_a_shorter_clip_is_the_beginning_of_the_whole_one(count):
    pipe = tiny_frame_pipeline()
    whole = pipe(PROMPT, generator=seeded(7), output_type="latent").frames
    found = pipe(PROMPT, num_frames=count, generator=seeded(7), output_type="latent")
    assert torch.equal(found.frames, whole[:, :count])
    assert found.trace.target_calls.tolist() == [4 * count - 1]


def test_a_saved_pipeline_says_what_it_is(tmp_path):
    pipe = tiny_frame_pipeline(FrameMaskedSampler(2, 0.25, unconditional_history="same"))
    pipe.save_pretrained(tmp_path)
    text = "frame-masked:steps=2,history_hidden=0.25,unconditional_history=same"
    for facts in (pipe.facts, read_facts(tmp_path)):
        assert facts.calls == ("frames",) and facts.medium == "video" and not facts.comparable
        assert facts.plain_sampler == facts.fast_sampler == text


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="out of 20"):
        VideoPipeline(tiny_frame_transformer(vocab_size=20), tiny_vq_model(), None, None)


def test_the_command_line_draws_with_it(tmp_path, capsys):
    tiny_frame_pipeline().save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--device", "cpu", "--format", "png", "--json"]
    sampler = ["--sampler", "frame-masked:steps=4,history_hidden=0.3"]
    for out, more, calls in (("own", [], 11), ("other", sampler, 14)):
        assert cli.main(["generate", PROMPT, "--out", str(tmp_path / out), *arguments, *more]) == 0
        document = last_line(capsys)
        (clip,) = document["videos"]
        assert clip["calls"] == calls and clip["tokens_per_call"] == pytest.approx(12 / calls)
    assert document["sampler"]["history_hidden"] == 0.3
    assert (
        cli.main(["generate", PROMPT, "--out", str(tmp_path / "no"), *arguments, "--sampler", "zipar"]) == 2
    )
    assert "those that fit: FrameMaskedSampler" in capsys.readouterr().err
