"""BitDance of texts: an official folder draws what its public code draws, bit for bit."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.bitdance import number, text_folder
from tests.helpers.command import last_line
from tests.helpers.recordings import repeated
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec import cli
from visual_spec.pipelines.bitdance_image import BitDanceImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.continuous import continuous
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.law import TokenLaw

# What `gen_image` of shallowdream204/BitDance (modeling/t2i_pipeline.py) draws for "a red fox" in six steps with noise,
# with the noise of samples of the seeds 1 and 2 in place of its own: as in tests/models/continuous/test_bitdance.py.
# (tokens of a call, gated, guidance, height, width): pictures
DRAWN = {
    (4, True, 3.0, 16, 8): (0x27ED007F9F9797DF7C7FFFFFBBFFCD7F, 0x6FC80A0BFE3F3FF7C7F5FFF87FFFFFF),
    (4, False, 1.0, 8, 8): (0xFFFFFFFFFFFF0000, 0xFFFFFFFFFFFF0000),
    (16, True, 3.0, 16, 16): (
        0xFF7FFF9EFBFFFFFFFD6B9E8C1F8F1FFFD7E629CF3070E0C01048E04000000000,
        0xBFFFFF95F0FFFFFFF72F9F840F7FFF6FF7EA7D440011000030D0C07000000000,
    ),
    (64, True, 3.0, 16, 32): (
        0xFFB5DDA2FFC3FFA1FFBFDFFFFFEFEFBFEECE325331CD185EBDF29FDF03D63A30CBFFDDDFECFF7FFBCAFFAFFF76FFF7FF25248C01EB3331DE0D6426082E81BE10,
        0xE79CD50EFFD3FF08FE7DDFB7FDDFEF1EFCEF7EEB339F18E6DDA611DF5B601A91EF7FF1FFECFDF6FFEEFFBFFF6EFFFBFF2F20DC5FEB1F50AE4D8124C30E077E12,
    ),
}
PROMPT, SHORT = "a red fox", ContinuousSampler(guidance="constant", head_steps=7)


@pytest.fixture
def pipeline(tmp_path) -> Any:
    return quiet(BitDanceImagePipeline.from_official(text_folder(tmp_path / "BitDance-14B-4x", 4)))


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: "-".join(map(str, case)))
def test_bits_are_those_of_the_public_code(case, tmp_path):
    tokens, gated, guidance, height, width = case
    pipe: Any = quiet(BitDanceImagePipeline.from_official(text_folder(tmp_path, tokens, gated)))
    assert pipe.sampler.config.guidance == "constant" and pipe.config.default_guidance_scale == 7.5
    assert pipe.transformer.chain.head_steps == 51
    pipe.sampler = SHORT
    settings = dict(height=height, width=width, num_images_per_prompt=2, guidance_scale=guidance)
    out = pipe(PROMPT, generator=seeded(1, 2), output_type="latent", **settings)
    assert tuple(map(number, out.images)) == DRAWN[case]
    # Two pixels a token of this tokenizer.
    assert (out.trace.target_calls == height * width // 4 // tokens).all()
    picture = pipe(PROMPT, generator=seeded(1, 2), output_type="pt", **settings).images
    assert picture.shape == (2, 3, height, width) and picture.std() > 0


def test_a_picture_depends_on_no_other_prompt(pipeline):
    """Prompts of other lengths stand beside it, padded."""
    pipeline.sampler = SHORT
    settings: Any = dict(height=16, width=8, guidance_scale=3.0, output_type="latent")
    alone = pipeline(PROMPT, generator=seeded(1), **settings).images
    both = pipeline([PROMPT, "a very long prompt"], generator=seeded(1, 2), **settings).images
    assert number(alone[0]) == number(both[0]) == DRAWN[4, True, 3.0, 16, 8][0] != number(both[1])


def test_it_is_converted_saved_and_drawn_on_the_command_line(pipeline, tmp_path, capsys):
    pipeline.sampler = SHORT
    settings: Any = dict(height=16, width=8, guidance_scale=3.0, output_type="latent")
    wanted = pipeline(PROMPT, generator=seeded(1), **settings).tokens
    pipeline.save_pretrained(tmp_path / "saved")
    assert cli.main(["convert", str(tmp_path / "BitDance-14B-4x"), "--out", str(tmp_path / "out")]) == 0
    for folder in ("saved", "out"):
        again: Any = quiet(load_pipeline(tmp_path / folder))
        assert again.plain_sampler == "continuous:guidance=constant"
        again.sampler = SHORT
        assert again(PROMPT, generator=seeded(1), **settings).tokens.equal(wanted)
    # 1,024 pixels are the size that calls draw where they name none; these are 32.
    config = tmp_path / "out" / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"grid_size": 16}))
    capsys.readouterr()
    command = [
        "generate",
        PROMPT,
        "--model",
        str(tmp_path / "out"),
        "--out",
        str(tmp_path / "drawn"),
        "--json",
    ]
    assert cli.main([*command, "--sampler", "continuous:guidance=constant,head_steps=2"]) == 0
    [image] = last_line(capsys)["images"]
    assert image["calls"] == 64 and len(list((tmp_path / "drawn").glob("*.png"))) == 1


def test_what_it_cannot_draw_is_refused_before_compute(pipeline, monkeypatch):
    monkeypatch.setattr(type(pipeline.transformer), "prefill", None)
    with pytest.raises(ValueError, match=r"does not know <\|res_18\|>.*8 x 36 pixels.*official folder"):
        pipeline(PROMPT, height=8, width=36)
    for settings, message in (
        ({"height": 6, "width": 8}, "multiples of 4"),
        ({"prompt": []}, "empty list"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"num_images_per_prompt": 0}, "num_images_per_prompt"),
    ):
        refuses(ValueError, message, pipeline, **{"prompt": PROMPT, "height": 8, "width": 8, **settings})


def test_folders_that_make_no_model_are_refused(tmp_path):
    folder = text_folder(tmp_path / "whole", 4)
    for name, message in (
        ("projector.safetensors", "lacks projector.safetensors"),
        ("vision_head_config.json", "lacks vision_head_config.json"),
        ("model.safetensors", "lacks model"),
    ):
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / name).unlink()
        refuses(ValueError, message, BitDanceImagePipeline.from_official, tmp_path / name)
    head = json.loads((folder / "vision_head_config.json").read_text())
    (folder / "vision_head_config.json").write_text(json.dumps(head | {"parallel_num": 6}))
    refuses(ValueError, "parallel_num=6, which is no square", BitDanceImagePipeline.from_official, folder)


def test_drafting_samplers_draw_with_it(pipeline):
    """Jacobi's first slots are plain decoding's, and its law too."""
    from visual_spec.pipelines.sampler_text import make_sampler

    settings: Any = dict(height=16, width=8, guidance_scale=3.0, output_type="latent", generator=seeded(1))
    pipeline.sampler = make_sampler("continuous-jacobi", guidance="constant", head_steps=7, final_noise=0.1)
    out = pipeline(PROMPT, **settings)
    assert out.trace.keeps == "lossless" and torch.isfinite(out.tokens).all()


@pytest.fixture
def recordings(monkeypatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(continuous, "wants_graph", lambda choice, model: choice is not False)
    yield from repeated(monkeypatch)


def test_recorded_calls_draw_every_prompt(recordings, pipeline):
    """A later prompt's keys and values take the place of the first one's."""
    model: Any = pipeline.transformer.with_grid(4, 2)
    for prompt in ("a red fox", "a big dog"):
        condition = pipeline.make_condition([prompt], height=16, width=8)
        both = (
            ContinuousSampler(guidance="constant", head_steps=7, graph=recorded)(
                model, condition, law=TokenLaw(guidance_scale=3.0), generator=seeded(1)[0]
            )
            for recorded in (True, False)
        )
        torch.testing.assert_close(*(result.tokens for result in both))
    assert len(recordings) == 1
