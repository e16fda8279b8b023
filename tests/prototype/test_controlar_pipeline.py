"""Pictures along a control picture: what the sampler draws for it; files converted, saved and loaded; refusals."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.helpers.command import last_line
from tests.helpers.official import add_tiny_presets, random_weights, tokenizer_shapes, write_class_model
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_pipeline, tiny_text_encoder
from tests.helpers.tiny_controlar import (
    CHANNELS,
    PIXELS,
    VOCAB,
    WORDS,
    add_preset,
    captions,
    controls,
    write_controlar,
)
from visual_spec import cli
from visual_spec.models.next_token import llamagen_vq
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.controlar import ControlARTransformer, ControlledCondition
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

VQ = dict(
    base_channels=8, channel_multipliers=(1, 1, 1, 1, 1), blocks_per_level=1, latent_channels=8, norm_groups=4
)


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
    """A tokenizer of 16 x 16 pixel tokens, the only ones that ControlAR has."""
    add_preset(monkeypatch)
    add_tiny_presets(monkeypatch)
    monkeypatch.setitem(llamagen_vq.PRESETS, "tiny", VQ)
    shapes = tokenizer_shapes((1,) * 5, width=8, blocks=1, latent=8, codes=VOCAB, code_width=4)
    torch.save({"model": random_weights(shapes)}, tmp_path / "vq.pt")
    return {"model": write_controlar(tmp_path, dtype=torch.float32), "vq": tmp_path / "vq.pt"}


def official(files: dict[str, Path]) -> Any:
    return quiet(ImagePipeline.from_official(files["model"], files["vq"], image_size=PIXELS))


def texts(rows: int) -> dict[str, Tensor]:
    given = captions(rows, torch.float32)
    return {"prompt_embeds": given["features"], "prompt_attention_mask": given["mask"]}


def test_a_picture_follows_its_own_control(files):
    pipe, pictures = official(files), (controls(2, torch.float32) + 1) / 2
    assert (pipe.facts.fast_sampler, pipe.default_settings()["guidance_scale"]) == ("speculative-jacobi", 4.0)
    settings: dict[str, Any] = dict(output_type="latent", guidance_scale=2.0, control_strength=0.7)
    found = pipe(
        **texts(2), control=list(pictures), generator=seeded(1, 2, 3, 4), num_images_per_prompt=2, **settings
    )
    rows = torch.tensor([0, 0, 1, 1])
    given = {name: value[rows] for name, value in captions(2, torch.float32).items()}
    condition = ControlledCondition(**given, control=2 * pictures[rows] - 1, strength=0.7)
    law = TokenLaw(2.0, top_k=2000)
    plain = AutoregressiveSampler()(
        pipe.transformer, condition, law=law, generator=seeded(1, 2, 3, 4), batch_size=4
    )
    assert torch.equal(found.tokens, plain.tokens) and found.trace.identical
    assert found.trace.target_calls.float().mean() < 16
    shared = pipe(**texts(2), control=pictures[1], generator=seeded(1, 4), **settings)
    assert torch.equal(shared.tokens[1], found.tokens[3]) and not torch.equal(
        shared.tokens[0], found.tokens[0]
    )


def guided_by_control(files: dict[str, Path]) -> Any:
    """The same weights, with guidance along the control alone."""
    pipe = official(files)
    pipe.transformer.register_to_config(guides="control")
    with torch.no_grad():  # its own null control says nothing, as where it was trained
        pipe.transformer.condition_mlp.uncond_embedding.zero_()
    return pipe


def test_guidance_along_the_control_leaves_the_caption_in_both_rows(files):
    """Raw logits: those with control, led away from those of the same caption with the null control."""
    pipe, pictures = guided_by_control(files), (controls(2, torch.float32) + 1) / 2
    given, scale = captions(2, torch.float32), 3.0
    condition = pipe.transformer.controlled(TextCondition(**given), list(pictures), 1.0)
    start: dict[str, Any] = dict(batch_size=2, window=1)
    both = pipe.transformer.prefill(condition, guided=True, **start).logits
    with_control = pipe.transformer.prefill(condition, guided=False, **start).logits
    without = pipe.transformer.prefill(TextCondition(**given), guided=False, **start).logits
    torch.testing.assert_close(both, torch.cat([with_control, without]))
    assert not torch.allclose(with_control, without)
    found = pipe(**texts(2), control=list(pictures), guidance_scale=scale, generator=seeded(1, 2))
    plain = AutoregressiveSampler()(
        pipe.transformer,
        replace(condition, negative=TextCondition(**given)),
        law=TokenLaw(scale, top_k=2000),
        generator=seeded(1, 2),
        batch_size=2,
    )
    assert torch.equal(found.tokens, plain.tokens) and found.trace.identical


def test_without_a_control_such_a_model_draws_its_captions(files):
    """Guidance then leads from a law to itself, and whoever names what to avoid is heard."""
    pipe = guided_by_control(files)
    draw: dict[str, Any] = dict(generator=seeded(1, 2), output_type="latent")
    found = pipe(**texts(2), guidance_scale=3.0, **draw).tokens
    plain = AutoregressiveSampler()(
        pipe.transformer,
        TextCondition(**captions(2, torch.float32)),
        law=TokenLaw(top_k=2000),
        generator=seeded(1, 2),
        batch_size=2,
    )
    assert torch.equal(found, plain.tokens)
    refuses(ValueError, "pass control", official(files), **texts(2), **draw)
    refuses(ValueError, "control_strength=0.5 without", pipe, **texts(2), control_strength=0.5, **draw)


def test_pictures_and_arrays_mean_the_same_and_strength_counts(files):
    pipe, generator = official(files), np.random.default_rng(0)
    array = generator.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)

    def draw(control: Any, **more: Any) -> Tensor:
        return pipe(**texts(1), control=control, generator=seeded(5), output_type="latent", **more).tokens

    expected = draw(torch.tensor(array).permute(2, 0, 1) / 255)
    assert torch.equal(draw(array), expected) and torch.equal(draw(Image.fromarray(array)), expected)
    assert not torch.equal(draw(array, control_strength=0.0), expected)
    grey = Image.fromarray(array[..., 0])
    assert torch.equal(draw(grey), draw(np.repeat(array[..., :1], 3, 2)))


def test_a_picture_has_the_size_of_its_control(files):
    pipe = official(files)
    control = torch.rand(3, 32, 80, generator=torch.Generator().manual_seed(8))
    out = pipe(**texts(2), control=control, generator=seeded(1, 2), guidance_scale=2.0, output_type="np")
    assert out.images.shape == (2, 32, 80, 3) and out.tokens.shape == (2, 10) and out.trace.identical
    size: dict[str, Any] = dict(output_type="latent", height=32, width=80)
    again = pipe(**texts(2), control=control, generator=seeded(1, 2), guidance_scale=2.0, **size)
    assert torch.equal(again.tokens, out.tokens) and again.images.shape == (2, 2, 5)
    condition = ControlledCondition(
        **captions(2, torch.float32), control=2 * control.expand(2, -1, -1, -1) - 1
    )
    plain = AutoregressiveSampler()(
        pipe.transformer.with_grid(2, 5),
        condition,
        law=TokenLaw(2.0, top_k=2000),
        generator=seeded(1, 2),
        batch_size=2,
    )
    assert torch.equal(plain.tokens, out.tokens)
    square = pipe(**texts(1), control=torch.rand(3, PIXELS, PIXELS), output_type="np")
    assert square.images.shape == (1, PIXELS, PIXELS, 3)


def test_official_files_become_a_pipeline(files, tmp_path, capsys):
    out = tmp_path / "out"
    command = [
        "convert",
        str(files["vq"]),
        str(files["model"]),
        "--out",
        str(out),
        "--image-size",
        str(PIXELS),
        "--json",
    ]
    assert cli.main(command) == 0
    facts = last_line(capsys)
    assert facts["class"] == "ImagePipeline" and facts["files"][str(files["model"])] == "ControlAR"
    loaded, direct = load_pipeline(out), official(files)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is ControlARTransformer
    request: dict[str, Any] = dict(control=controls(1)[0] / 2 + 0.5, output_type="latent")
    one, two = (pipe(**texts(1), generator=seeded(1), **request).tokens for pipe in (loaded, direct))
    assert torch.equal(one, two)
    alone = tmp_path / "alone"
    assert cli.main(["convert", str(files["model"]), "--out", str(alone), "--image-size", str(PIXELS)]) == 0
    assert ControlARTransformer.from_pretrained(alone).grid.num_tokens == 16


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["model", "model"], [], "are both of one kind"),
        (["model", "class"], [], "c2i_tiny.pt is not of ControlAR, .* vq_ds16_t2i.pt"),
        (["model"], ["--text-encoder", "t5"], "text_encoder=t5 given"),
        (["model"], ["--image-size", "40"], "image_size=40"),
    ],
)
def test_files_that_make_no_pipeline_are_refused(files, tmp_path, capsys, names, more, message):
    files["class"] = write_class_model(tmp_path)
    out = tmp_path / "out"
    assert cli.main(["convert", *(str(files[name]) for name in names), "--out", str(out), *more]) == 2
    assert re.search(message, capsys.readouterr().err) and not out.exists()


def test_controls_that_do_not_fit_are_refused(files):
    pipe, control = official(files), torch.rand(3, PIXELS, PIXELS)
    for message, settings in [
        ("pass control", {}),
        ("height=60, width=64.*16, or resize the control", {"control": control[:, 4:]}),
        ("height=96, width=80.*1.*25.*Resize the control picture.$", {"control": torch.rand(3, 96, 80)}),
        (
            "height=60.*or resize the control",
            {"control": control[:, 4:], "height": PIXELS - 4, "width": PIXELS},
        ),
        ("64 x 64.*height=32", {"control": control, "height": 32}),
        (r"several sizes, \[\(48, 64\), \(64, 64\)\]", {"control": [control, control[:, 16:]], "prompts": 2}),
        ("2 control.*1.*1.*1", {"control": [control, control]}),
        ("control_strength=inf", {"control": control, "control_strength": float("inf")}),
    ]:
        refuses(ValueError, message, pipe, **texts(settings.pop("prompts", 1)), **settings)
    refuses(TypeError, "control.*PIL", pipe, **texts(1), control="edges.png")
    plain: Any = tiny_pipeline()
    for settings in ({"control": control}, {"control_strength": 0.5}):
        refuses(ValueError, "control_strength given", plain, "a red circle", **settings)
    assert (WORDS, CHANNELS) == tuple(texts(1)["prompt_embeds"].shape[1:])


def test_the_command_draws_along_a_picture(files, tmp_path, capsys):
    pipe = official(files)
    pipe.text_encoder = tiny_text_encoder()
    pipe.save_pretrained(tmp_path / "saved")
    edges, other = tmp_path / "edges.png", tmp_path / "odd.png"
    array = np.random.default_rng(0).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    Image.fromarray(array).save(edges)
    other.write_text("no picture")
    command = ["generate", "red circle", "--model", str(tmp_path / "saved"), "--seed", "3", "--json", "--out"]

    def run(out: str, *more: str) -> int:
        return cli.main([*command, str(tmp_path / out), *more])

    assert run("one", "--control", str(edges), "--control-strength", "0.8") == 0
    told = last_line(capsys)
    assert (told["control"], told["control_strength"]) == (str(edges), 0.8)
    (drawn,) = (tmp_path / "one").glob("*.png")
    expected = pipe("red circle", control=array, control_strength=0.8, generator=seeded(3)).images[0]
    assert np.array_equal(np.asarray(Image.open(drawn)), np.asarray(expected))
    for more, message in [
        ((), "draws along a control picture; pass control"),
        (("--control", str(other)), "odd.png is no picture; pass a PNG"),
        (("--control", str(tmp_path / "none.png")), "none.png"),
    ]:
        assert run("two", *more) == 2 and re.search(message, capsys.readouterr().err)
    assert (
        cli.main(
            ["generate", "0", "--model", "shapes_var", "--control", str(edges), "--out", str(tmp_path / "x")]
        )
        == 2
    )
    assert "shapes_var takes no --control" in capsys.readouterr().err
