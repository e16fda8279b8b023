"""Class pictures by a student of VAR: what the sampler draws, decoded; its files converted, saved and loaded."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distilled_pipelines import scale_student_pipeline
from tests.helpers.official import write_tokenizer
from tests.helpers.tiny import quiet, seeded
from tests.helpers.tiny_scales import SIDES, TINY_VQ, tiny_var, tiny_var_vq
from tests.helpers.tiny_students import VAR_SIZE, write_var_student
from visual_spec import cli
from visual_spec.models.next_scale import var_student
from visual_spec.models.next_scale.var_student import VARStudent
from visual_spec.pipelines import distilled_scales
from visual_spec.pipelines.distilled_scales import DistilledScalePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.distilled import DistilledSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
    size = {"num_layers": 2, "num_heads": 2, "dim": 16, **VAR_SIZE}
    monkeypatch.setitem(var_student.STUDENTS, "tiny", size)
    monkeypatch.setitem(var_student.SCALES, 256, SIDES)
    torch.save(tiny_var(4, torch.float32).state_dict(), tmp_path / "var.pth")
    torch.save(tiny_var_vq().state_dict(), tmp_path / "vae.pth")

    def load(path, *, dtype=None, **settings):
        return real(path, dtype=dtype, **{**TINY_VQ, "scales": SIDES})

    real = distilled_scales.load_var_vq_checkpoint
    monkeypatch.setattr(distilled_scales, "load_var_vq_checkpoint", functools.wraps(real)(load))
    return {
        "student": write_var_student(tmp_path),
        "vae": tmp_path / "vae.pth",
        "teacher": tmp_path / "var.pth",
    }


def convert(out: Path, *arguments: Any) -> int:
    return cli.main(["convert", *map(str, arguments), "--out", str(out), "--json"])


@torch.no_grad()
def test_pictures_are_the_vectors_of_the_sampler_added_up():
    pipe = scale_student_pipeline(steps=2)
    found = pipe([3, 1], generator=seeded(3, 4), output_type="pt")
    tokens = DistilledSampler(steps=2)(
        pipe.transformer,
        torch.tensor([3, 1]),
        law=TokenLaw(),
        generator=seeded(3, 4),
        batch_size=2,
        codebook=pipe.vq_model.quantize.embedding.weight,
    ).tokens
    assert torch.equal(found.tokens, tokens) and tokens.shape == (2, 30, 2)
    # By hand: every map enlarged, half of it smoothed, all added up; the smoothers serve the scales in turn.
    canvas, at = torch.zeros(2, 2, 4, 4), 0
    for scale, side in enumerate(SIDES):
        part = torch.stack([tokens[:, at + place] for place in range(side * side)], -1).reshape(
            2, 2, side, side
        )
        canvas, at = pipe.vq_model.accumulate_codes(canvas, scale, part), at + side * side
    latent = pipe([3, 1], generator=seeded(3, 4), output_type="latent").images
    assert torch.allclose(latent, canvas, atol=1e-6)
    pixels = pipe.vq_model.decoder(pipe.vq_model.post_quant_conv(canvas))
    assert torch.allclose(found.images, (pixels.clamp(-1, 1) + 1) / 2, atol=1e-6)
    assert found.trace.output_law == "lossy" and found.trace.target_calls.tolist() == [2, 2]
    assert pipe.image_size == (8, 8) and pipe.facts.stored_as == "canvas"


def test_ids_are_decoded_as_the_pipeline_of_the_teacher_decodes_them():
    pipe, ids = (
        scale_student_pipeline(),
        torch.randint(0, 12, (2, 30), generator=torch.Generator().manual_seed(1)),
    )
    other = ScaleImagePipeline(tiny_var(4, torch.float32), pipe.vq_model, ScaleWiseSampler())
    assert torch.allclose(pipe.decode_tokens(ids, "latent"), other.decode_tokens(ids, "latent"), atol=1e-6)


def test_the_teacher_draws_with_the_law_of_the_call_and_with_its_default():
    pipe = scale_student_pipeline(teacher=True, steps=2, teacher_from=0)
    assert pipe.default_settings() | {"guidance_scale": 3.0, "top_k": 900} == pipe.default_settings()
    codes = pipe.vq_model.codebook
    for asked, law in (
        ({"top_k": 5}, TokenLaw(3.0, top_k=5)),
        ({"guidance_scale": 1.5, "top_k": 0, "top_p": 0.9}, TokenLaw(1.5, top_p=0.9)),
    ):
        found = pipe([3, 1], generator=seeded(3, 4), **asked)
        plain = ScaleWiseSampler()(
            pipe.teacher, pipe.vq_model, torch.tensor([3, 1]), law=law, generator=seeded(3, 4), batch_size=2
        )
        assert torch.equal(found.tokens[:, :5], codes[plain.tokens[:, :5]])
        assert found.trace.target_calls.tolist() == [3, 3]


def test_official_files_become_a_pipeline_in_any_order(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(out, files["teacher"], files["student"], files["vae"], "--image-size", "8") == 0
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert facts["class"] == "DistilledScalePipeline"
    assert facts["files"] == {
        str(files["student"]): "VAR's student", str(files["teacher"]): "VAR-d2", str(files["vae"]): "VAR's tokenizer",
    }  # fmt: skip
    assert set(facts["parameters"]) == {"transformer", "vq_model", "teacher"}
    loaded = quiet(load_pipeline(out))
    direct: Any = DistilledScalePipeline.from_official(
        files["student"], files["vae"], teacher=files["teacher"]
    )
    direct.set_progress_bar_config(disable=True)
    for pipe in (loaded, direct):
        assert type(pipe) is DistilledScalePipeline and pipe.sampler.config["steps"] == 2
    for settings in ({"steps": 2}, {"steps": 2, "teacher_from": 1}):
        loaded.sampler = direct.sampler = make_sampler("distilled", **settings)
        asked = {"top_k": 5} if "teacher_from" in settings else {}
        one, two = (pipe(4, generator=seeded(1), output_type="latent", **asked) for pipe in (loaded, direct))
        assert torch.equal(one.images, two.images) and one.images.shape == (1, 2, 4, 4)
    # The tokens below this slot are codes; published figures with a teacher choose it.
    more: Any = DistilledScalePipeline.from_official(files["student"], files["vae"], first_continuous=30)
    tokens = more(4, generator=seeded(1), output_type="latent").tokens
    assert (tokens[0, :, None] == more.vq_model.codebook).all(-1).any(-1).all()


def test_a_student_alone_becomes_a_model_and_the_command_draws(files, tmp_path, capsys):
    assert convert(tmp_path / "one", files["student"]) == 0
    assert VARStudent.from_pretrained(tmp_path / "one").scales == SIDES
    assert convert(tmp_path / "pair", files["student"], files["vae"]) == 0
    drawn = ["generate", "3", "--model", str(tmp_path / "pair"), "--out", str(tmp_path / "pictures")]
    assert cli.main([*drawn, "--sampler", "distilled:steps=1"]) == 0
    assert len([*(tmp_path / "pictures").glob("*.png")]) == 1
    assert "lossy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["student", "student"], [], "are both of one kind"),
        (["student", "teacher"], [], "given without their tokenizer; pass vae_ch160v4096z32.pth too"),
        (["student", "vae"], ["--image-size", "64"], "image_size=64 given, but .* draws 8 pixels"),
        (["student", "vae"], ["--text-encoder", "t5"], "text_encoder=t5 given for"),
        (["student", "other"], [], "vq_tiny.pt is not of DD1 student of VAR"),
    ],
)
def test_files_that_make_no_pipeline_are_refused(files, tmp_path, capsys, names, more, message):
    out = tmp_path / "out"
    files["other"] = write_tokenizer(tmp_path)
    assert convert(out, *(files[name] for name in names), *more) == 2
    assert re.search(message, capsys.readouterr().err) and not out.exists()


def test_what_does_not_fit_is_refused_by_name():
    pipe = scale_student_pipeline()
    with pytest.raises(ValueError, match="guidance_scale=3.* the student draws alone"):
        pipe(1, guidance_scale=3.0)
    pipe.sampler = make_sampler("distilled", steps=2, teacher_from=1)
    with pytest.raises(
        ValueError, match="teacher_from=1, and this pipeline has no teacher; set pipe.teacher"
    ):
        pipe(1)
    parts: Any = (pipe.transformer, make_sampler("distilled"))
    with pytest.raises(
        ValueError, match=r"the tokenizer has scales \(1, 2, 3, 4\) of 9 codes with 2 numbers"
    ):
        DistilledScalePipeline(parts[0], tiny_var_vq(codebook_size=9), parts[1])
    with pytest.raises(ValueError, match=r"the teacher draws scales \(1, 2, 4\) of 12 codes with 2 numbers"):
        DistilledScalePipeline(parts[0], pipe.vq_model, parts[1], teacher=tiny_var(scales=(1, 2, 4)))
