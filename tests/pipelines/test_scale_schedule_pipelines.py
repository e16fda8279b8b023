"""Schedules in the pipelines of VAR and Infinity and on the command line: what is drawn, saved, shown and refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from tests.helpers.infinity import PROMPTS, TIGHT, tiny_pipeline
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec import cli
from visual_spec.pipelines.infinity import InfinityPipeline
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.trace import ScaleTrace

HALF = {"keep_share": [0.5, 0.3], "guided_until": 3}


def infinity(schedule: Any = None, **settings: Any) -> InfinityPipeline:
    pipe = tiny_pipeline()
    pipe.sampler = ScaleWiseSampler(ramp=False, schedule=schedule, **settings)
    return pipe


def trace_of(output: Any) -> ScaleTrace:
    return output.trace


def test_infinity_draws_late_scales_without_guidance_as_with_a_list_that_ends_in_ones():
    listed = infinity()(PROMPTS, guidance_scale=[4, 4, 1, 1], generator=seeded(1, 2), output_type="latent")
    found = infinity("stagevar")(PROMPTS, guidance_scale=4, generator=seeded(1, 2), output_type="latent")
    # "stagevar" leaves the last three of the four scales unguided.
    assert not torch.equal(found.tokens, listed.tokens)
    found = infinity({"guided_until": 2})(
        PROMPTS, guidance_scale=4, generator=seeded(1, 2), output_type="latent"
    )
    assert torch.equal(found.tokens, listed.tokens)
    # Rows of another number are added up in another order.
    assert (found.images - listed.images).abs().max() < 1e-5
    assert not found.trace.lossless and listed.trace.lossless
    assert trace_of(found).layer_places == (2 * (2 * 5 + 25),) and trace_of(listed).layer_places == (
        2 * 2 * 30,
    )


def test_infinity_stops_where_the_callback_would_have_looked():
    seen: list[Any] = []
    pipe = infinity()

    def look(pipe: Any, scale: int, bits: int, tensors: dict[str, Any]) -> None:
        seen.append((scale, bits, pipe.decode_canvas(tensors["canvas"], "pt")))

    plain = pipe(PROMPTS, generator=seeded(1, 2), output_type="pt", callback_on_step_end=look)
    pipe.sampler = ScaleWiseSampler(ramp=False, schedule={"stop_after": -2})
    pipe.set_progress_bar_config(disable=False, leave=False)
    told: list[Any] = []
    found = pipe(
        PROMPTS, generator=seeded(1, 2), output_type="pt", callback_on_step_end=lambda *given: told.append(given[1:3])
    )  # fmt: skip
    assert torch.equal(found.images, seen[2][2]) and torch.equal(found.tokens, plain.tokens[:, :42])
    assert told == [one[:2] for one in seen[:3]] and pipe.num_timesteps == 3
    assert found.trace.target_calls.tolist() == [3, 3] and found.trace.divergence is None


def test_infinity_prunes_its_large_maps(tmp_path: Path):
    pipe = infinity(HALF, measure=True)
    found = pipe(PROMPTS, generator=seeded(1, 2), output_type="latent")
    condition = pipe.text_encoder(PROMPTS)
    law = TokenLaw(4.0, 0.5, top_p=0.97)
    want = pipe.sampler(
        pipe.transformer, condition, tokenizer=pipe.vq_model, law=law, generator=seeded(1, 2), batch_size=2
    )
    assert torch.equal(found.tokens, want.tokens) and torch.equal(found.images, want.canvas)
    assert not torch.equal(
        found.tokens, infinity()(PROMPTS, generator=seeded(1, 2), output_type="latent").tokens
    )
    assert trace_of(found).layer_places == (2 * (2 * (1 + 4 + 5) + 5),)
    assert 0.01 < (found.trace.divergence or 0) < 1
    pipe.save_pretrained(tmp_path)
    again = quiet(InfinityPipeline.from_pretrained(tmp_path))
    assert torch.equal(again(PROMPTS, generator=seeded(1, 2), output_type="latent").tokens, found.tokens)


def test_schedules_that_do_not_fit_are_refused_before_the_captions_are_read(monkeypatch):
    for schedule, compressed, message in [
        ({"stop_after": 4}, False, "stop_after=4.*0.*3"),
        ({"keep_share": 0.5}, True, "CompressedVAR.*keep_share"),
    ]:
        pipe = infinity(schedule)
        pipe.compress(TIGHT if compressed else None)
        monkeypatch.setattr(type(pipe), "make_condition", None)
        refuses(ValueError, message, pipe, PROMPTS, output_type="latent")


def test_classes_with_a_refiner_that_never_draws(tmp_path: Path):
    pipe = tiny_scale_pipeline()  # the refiner draws scales 2 and 3
    plain = pipe([0, 1], generator=seeded(1, 2), output_type="pt")
    pipe.sampler = ScaleWiseSampler(schedule={"stop_after": 1})
    found = pipe([0, 1], generator=seeded(1, 2), output_type="pt")
    assert torch.equal(found.tokens, plain.tokens[:, :5]) and trace_of(found).model_calls == (2,)
    assert torch.equal(found.images, pipe.decode_tokens(found.tokens, "pt"))
    with pytest.raises(ValueError, match=r"keep_share=0\.5.*2"):
        pipe.sampler = ScaleWiseSampler(schedule={"stop_after": 2, "keep_share": [0.5]})
        pipe([0, 1])
    found = pipe([0, 1], num_draft_scales=4, generator=seeded(1, 2), output_type="pt")
    assert trace_of(found).model_calls == (3,) and trace_of(found).layer_places == (2 * 2 * (1 + 4 + 5),)
    pipe.save_pretrained(tmp_path)
    again = ScaleImagePipeline.from_pretrained(tmp_path)
    assert again.sampler.schedule == pipe.sampler.schedule


def test_a_schedule_on_the_command_line(tmp_path: Path, capsys):
    tiny_scale_pipeline().save_pretrained(tmp_path / "model")

    def generate(row: str, out: str) -> tuple[int, str]:
        options = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / out), "--device", "cpu"]
        status = cli.main(["generate", "0", *options, "--sampler", f"scale-wise:{row}", "--json"])
        told = capsys.readouterr()
        return status, told.err if status else told.out.strip().splitlines()[-1]

    status, told = generate("num_draft_scales=all,schedule=just-stop", "stop")
    document = json.loads(told)
    assert status == 0 and document["images"][0]["calls"] == 2
    pipe = tiny_scale_pipeline(sampler=ScaleWiseSampler(schedule={"stop_after": 1}))
    want = pipe(0, generator=torch.Generator().manual_seed(0), num_draft_scales=4).images[0]
    assert np.array_equal(np.asarray(PIL.Image.open(document["images"][0]["file"])), np.asarray(want))
    compared = [
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(tmp_path / "two"),
        "--device",
        "cpu",
        "--compare",
    ]
    assert cli.main(["generate", "0", *compared, "--sampler", "scale-wise:schedule=just-stop"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("0 "))
    assert "4 -> 2" in line and "7.50 -> 2.50" in line
    status, told = generate("num_draft_scales=all,guided_until=2,keep_share=0.5/0.3", "pruned")
    assert status == 0 and json.loads(told)["sampler"]["schedule"] == {
        "guided_until": 2,
        "keep_share": [0.5, 0.3],
    }
    status, told = generate("stop_after=9", "wrong")
    assert status == 2 and "stop_after=9; pass the last scale to draw, from 0 to 3" in told
    status, told = generate("schedule=slow", "wrong")
    assert status == 2 and "schedule='slow'; pass one of just-stop, skipvar" in told
