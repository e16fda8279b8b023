"""Class pictures by a student: what the sampler draws, decoded; its files converted, saved and loaded; refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distilled_pipelines import class_student_pipeline
from tests.helpers.official import (
    VQ_SHAPES,
    add_tiny_presets,
    write_class_model,
    write_text_model,
    write_tokenizer,
)
from tests.helpers.tiny import quiet, seeded, tiny_transformer, tiny_vq_model
from tests.helpers.tiny_students import SIDE, SIZE, write_student
from visual_spec import cli
from visual_spec.models.next_token import llamagen_student
from visual_spec.models.next_token.llamagen_student import LlamaGenStudent
from visual_spec.pipelines.distilled_image import DistilledImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.distilled import DistilledSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, Path]:
    add_tiny_presets(monkeypatch)
    monkeypatch.setitem(llamagen_student.STUDENTS, "tiny", SIZE)
    assert VQ_SHAPES["quantize.embedding.weight"] == (12, 4)
    return {
        "student": write_student(tmp_path),
        "vq": write_tokenizer(tmp_path),
        "teacher": write_class_model(tmp_path),
    }


def convert(out: Path, *arguments: Any) -> int:
    return cli.main(["convert", *map(str, arguments), "--out", str(out), "--json"])


def test_pictures_are_the_vectors_of_the_sampler_decoded_as_they_are():
    pipe = class_student_pipeline(steps=2)
    found = pipe([5, 1], generator=seeded(3, 4), output_type="pt")
    book = torch.nn.functional.normalize(pipe.vq_model.quantize.embedding.weight, dim=-1)
    tokens = DistilledSampler(steps=2)(
        pipe.transformer,
        torch.tensor([5, 1]),
        law=TokenLaw(),
        generator=seeded(3, 4),
        batch_size=2,
        codebook=book,
    ).tokens
    assert torch.equal(found.tokens, tokens)
    canvas = torch.stack([tokens[:, slot] for slot in range(SIDE * SIDE)], -1).reshape(2, 4, SIDE, SIDE)
    with torch.no_grad():
        pixels = pipe.vq_model.decoder(pipe.vq_model.post_quant_conv(canvas))
    assert torch.allclose(found.images, (pixels.clamp(-1, 1) + 1) / 2, atol=1e-6)
    assert torch.equal(pipe([5, 1], generator=seeded(3, 4), output_type="latent").images, canvas)
    assert found.trace.output_law == "lossy" and found.trace.target_calls.tolist() == [2, 2]


def test_the_teacher_draws_with_the_law_of_the_call_and_with_its_default():
    pipe = class_student_pipeline(teacher=True, steps=2, teacher_from=0)
    assert pipe.default_settings()["guidance_scale"] == 2.0
    codes = pipe.vq_model.quantize.codes
    for asked, scale in (({}, 2.0), ({"guidance_scale": 1.3}, 1.3)):
        found = pipe([5, 1], generator=seeded(3, 4), output_type="latent", **asked)
        plain = AutoregressiveSampler()(
            pipe.teacher, torch.tensor([5, 1]), law=TokenLaw(scale), generator=seeded(3, 4), batch_size=2
        )
        kept = SIZE["restart"]
        assert torch.equal(found.tokens[:, :kept], codes[plain.tokens[:, :kept]])


def test_official_files_become_a_pipeline_in_any_order(files, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(out, files["teacher"], files["student"], files["vq"], "--image-size", "8") == 0
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (
        facts["class"] == "DistilledImagePipeline"
        and facts["files"][str(files["student"])] == "LlamaGen's student"
    )
    assert set(facts["parameters"]) == {"transformer", "vq_model", "teacher"}
    loaded = quiet(load_pipeline(out))
    direct: Any = DistilledImagePipeline.from_official(
        files["student"], files["vq"], teacher=files["teacher"]
    )
    direct.set_progress_bar_config(disable=True)
    for pipe in (loaded, direct):
        assert type(pipe) is DistilledImagePipeline and pipe.sampler.config["steps"] == 2
        assert pipe.image_size == (8, 8) and pipe.facts.stored_as == "canvas" and not pipe.comparable
    for settings in ({"steps": 2}, {"steps": 2, "teacher_from": 3}):
        loaded.sampler = direct.sampler = make_sampler("distilled", **settings)
        one, two = (pipe(6, generator=seeded(1), output_type="latent").images for pipe in (loaded, direct))
        assert torch.equal(one, two) and one.shape == (1, 4, SIDE, SIDE)


def test_a_student_alone_becomes_a_model_and_the_command_draws(files, tmp_path, capsys):
    assert convert(tmp_path / "one", files["student"]) == 0
    assert LlamaGenStudent.from_pretrained(tmp_path / "one").grid.width == SIDE
    assert convert(tmp_path / "pair", files["student"], files["vq"]) == 0
    drawn = ["generate", "3", "--model", str(tmp_path / "pair"), "--out", str(tmp_path / "pictures")]
    assert cli.main([*drawn, "--sampler", "distilled:steps=1"]) == 0
    assert len([*(tmp_path / "pictures").glob("*.png")]) == 1
    assert "lossy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (["student", "student"], [], "are both of one kind"),
        (["student", "teacher"], [], "given without their tokenizer; pass vq_ds16_c2i.pt too"),
        (["student", "vq"], ["--image-size", "64"], "image_size=64 given, but .* draws 8 pixels"),
        (["student"], ["--image-size", "8"], "image_size=8 given, but .* draws 64 pixels"),
        (["student", "vq"], ["--text-encoder", "t5"], "text_encoder=t5 given for"),
    ],
)
def test_files_that_make_no_pipeline_are_refused(files, tmp_path, capsys, names, more, message):
    out = tmp_path / "out"
    assert convert(out, *(files[name] for name in names), *more) == 2
    assert re.search(message, capsys.readouterr().err) and not out.exists()


def test_what_does_not_fit_is_refused_by_name(files, tmp_path):
    pipe = class_student_pipeline()
    with pytest.raises(ValueError, match="guidance_scale=3.* the student draws alone"):
        pipe(1, guidance_scale=3.0)
    with pytest.raises(ValueError, match="temperature=0.5.* the student draws alone"):
        pipe(1, temperature=0.5)
    pipe.sampler = make_sampler("distilled", steps=2, teacher_from=2)
    with pytest.raises(
        ValueError, match="teacher_from=2, and this pipeline has no teacher; set pipe.teacher"
    ):
        pipe(1)
    pipe.sampler = make_sampler("speculative-jacobi")
    with pytest.raises(TypeError, match="DistilledSampler"):
        pipe(1)
    with pytest.raises(ValueError, match="tokens of 4 numbers, but the tokenizer's codes have 3"):
        DistilledImagePipeline(pipe.transformer, tiny_vq_model(codebook_dim=3), make_sampler("distilled"))
    with pytest.raises(ValueError, match=r"the teacher draws TokenGrid\(height=3"):
        small = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1, grid_size=3)
        DistilledImagePipeline(pipe.transformer, pipe.vq_model, make_sampler("distilled"), teacher=small)
    with pytest.raises(
        ValueError, match="teacher is text-conditional, and this student, which draws classes, did not"
    ):
        DistilledImagePipeline.from_official(
            files["student"], files["vq"], teacher=write_text_model(tmp_path)
        )
