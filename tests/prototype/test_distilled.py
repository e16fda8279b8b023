"""Pictures by students: what the sampler draws, decoded; files converted, saved, shared and loaded; refusals."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.assemble import RECIPES, assemble
from tests.helpers.command import convert, last_line
from tests.helpers.distilled_pipelines import (
    class_student_pipeline,
    scale_student_pipeline,
    text_student_pipeline,
)
from tests.helpers.official import (
    VQ_SHAPES,
    add_tiny_presets,
    write_class_model,
    write_text_model,
    write_tokenizer,
)
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_transformer, tiny_vq_model
from tests.helpers.tiny_scales import SIDES, TINY_VQ, tiny_var, tiny_var_vq
from tests.helpers.tiny_students import SIDE, SIZE, VAR_SIZE, tiny_student, write_student, write_var_student
from visual_spec import cli
from visual_spec.eval.defaults import settings_of_model
from visual_spec.pipelines.embedded import describe, part_folder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.prototype.students import llamagen as llamagen_student
from visual_spec.prototype.students import scale_pipeline as distilled_scales
from visual_spec.prototype.students import var as var_student
from visual_spec.prototype.students.image_pipelines import DistilledImagePipeline, DistilledTextImagePipeline
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.prototype.students.sampler import DistilledSampler
from visual_spec.prototype.students.scale_pipeline import DistilledScalePipeline
from visual_spec.prototype.students.var import VARStudent
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.training.loop import round_matrices

PROMPTS = ["a red circle", "a large blue square"]


# -- drawing ----------------------------------------------------------------------------------------------------------


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


def test_ids_are_decoded_as_the_pipeline_of_the_teacher_decodes_them():
    pipe, ids = (
        scale_student_pipeline(),
        torch.randint(0, 12, (2, 30), generator=torch.Generator().manual_seed(1)),
    )
    other = ScaleImagePipeline(tiny_var(4, torch.float32), pipe.vq_model, ScaleWiseSampler())
    assert torch.allclose(pipe.decode_tokens(ids, "latent"), other.decode_tokens(ids, "latent"), atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_prompts_become_codes_of_the_students_calls(steps):
    pipe = text_student_pipeline(steps=steps)
    found = pipe(PROMPTS, generator=seeded(3, 4), output_type="latent")
    model, told = pipe.transformer, pipe.make_condition(PROMPTS)
    codes = pipe.vq_model.quantize.codes
    # The noise of the picture is what the teacher's slots do not depend on: ask the sampler for none of it.
    noise = _noise(pipe)
    state = model.prefill(told, batch_size=2)
    tokens = codes[model(state, noise, 0).logits.argmax(-1)]
    if steps == 2:
        kept = SIZE["restart"]
        again = torch.cat([tokens[:, :kept], noise[:, kept:]], 1)
        tokens[:, kept:] = codes[model(state, again, kept).logits.argmax(-1)]
    assert torch.equal(found.tokens, tokens) and found.trace.target_calls.tolist() == [steps, steps]
    assert found.images.shape == (2, 4, SIDE, SIDE)
    ids = (found.tokens[:, :, None] == codes).all(-1).long().argmax(-1)  # every slot holds a code
    assert torch.equal(pipe.decode_tokens(ids, "latent"), found.images)
    alone = pipe(PROMPTS[1], generator=seeded(4), output_type="latent")
    assert torch.equal(alone.tokens[0], found.tokens[1])


def _noise(pipe: Any) -> torch.Tensor:
    """The noise that seeds 3 and 4 give: what a model sees in its first call."""
    seen = []
    forward = pipe.transformer.forward
    pipe.transformer.forward = lambda state, vectors, known: (
        seen.append((vectors, known)) or forward(state, vectors, known)
    )
    pipe(PROMPTS, generator=seeded(3, 4), output_type="latent")
    del pipe.transformer.forward
    (noise, known), *_ = seen
    assert known == 0 and abs(float(noise.std()) - 1) < 0.2
    return noise


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


def test_a_teacher_of_scales_draws_with_the_law_of_the_call_and_with_its_default():
    pipe = scale_student_pipeline(teacher=True, steps=2, teacher_from=0)
    assert pipe.default_settings() | {"guidance_scale": 3.0, "top_k": 900} == pipe.default_settings()
    codes = pipe.vq_model.codebook
    for asked, law in (
        ({"top_k": 5}, TokenLaw(3.0, top_k=5)),
        ({"guidance_scale": 1.5, "top_k": 0, "top_p": 0.9}, TokenLaw(1.5, top_p=0.9)),
    ):
        found = pipe([3, 1], generator=seeded(3, 4), **asked)
        plain = ScaleWiseSampler()(
            pipe.teacher,
            torch.tensor([3, 1]),
            tokenizer=pipe.vq_model,
            law=law,
            generator=seeded(3, 4),
            batch_size=2,
        )
        assert torch.equal(found.tokens[:, :5], codes[plain.tokens[:, :5]])
        assert found.trace.target_calls.tolist() == [3, 3]


def test_the_teacher_draws_from_the_prompt_with_its_guidance():
    pipe = text_student_pipeline(steps=2, teacher_from=0)
    found = pipe(PROMPTS, generator=seeded(3, 4), output_type="latent", guidance_scale=1.4)
    plain = AutoregressiveSampler()(
        pipe.teacher, pipe.make_condition(PROMPTS), law=TokenLaw(1.4), generator=seeded(3, 4), batch_size=2
    )
    kept = SIZE["restart"]
    assert torch.equal(found.tokens[:, :kept], pipe.vq_model.quantize.codes[plain.tokens[:, :kept]])


# -- files ------------------------------------------------------------------------------------------------------------


def class_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    add_tiny_presets(monkeypatch)
    monkeypatch.setitem(llamagen_student.STUDENTS, "tiny", SIZE)
    assert VQ_SHAPES["quantize.embedding.weight"] == (12, 4)
    return {
        "student": write_student(folder),
        "tokenizer": write_tokenizer(folder),
        "teacher": write_class_model(folder),
    }


def scale_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    size = {"num_layers": 2, "num_heads": 2, "dim": 16, **VAR_SIZE}
    monkeypatch.setitem(var_student.STUDENTS, "tiny", size)
    monkeypatch.setitem(var_student.SCALES, 256, SIDES)
    torch.save(tiny_var(4, torch.float32).state_dict(), folder / "var.pth")
    torch.save(tiny_var_vq().state_dict(), folder / "vae.pth")

    def load(path, *, dtype=None, **settings):
        return real(path, dtype=dtype, **{**TINY_VQ, "scales": SIDES})

    real = distilled_scales.load_var_vq_checkpoint
    monkeypatch.setattr(distilled_scales, "load_var_vq_checkpoint", functools.wraps(real)(load))
    other = write_tokenizer(folder)  # of LlamaGen
    named = {"student": write_var_student(folder), "tokenizer": folder / "vae.pth"}
    return named | {"teacher": folder / "var.pth", "other": other}


@dataclass(frozen=True)
class Student:
    """A family: its files, its pipeline and model, what they are called, and a request with a teacher."""

    write: Callable[[Path, pytest.MonkeyPatch], dict[str, Path]]
    pipeline: Any
    model: Any
    called: dict[str, str]
    canvas: tuple[int, ...]
    teacher_from: int
    label: int
    law: dict[str, Any] = field(default_factory=dict)


STUDENTS = {
    "LlamaGen": Student(
        class_files,
        DistilledImagePipeline,
        LlamaGenStudent,
        {"student": "LlamaGen's student"},
        (4, SIDE, SIDE),
        3,
        6,
    ),
    "VAR": Student(
        scale_files,
        DistilledScalePipeline,
        VARStudent,
        {"student": "VAR's student", "teacher": "VAR-d2", "tokenizer": "VAR's tokenizer"},
        (2, 4, 4),
        1,
        4,
        {"top_k": 5},
    ),
}


@pytest.fixture
def files(family, tmp_path, monkeypatch) -> dict[str, Path]:
    return STUDENTS[family].write(tmp_path, monkeypatch)


EVERY = pytest.mark.parametrize("family", STUDENTS)


@EVERY
def test_official_files_become_a_pipeline_in_any_order(family, files, tmp_path, capsys):
    out, student = tmp_path / "out", STUDENTS[family]
    given = files["teacher"], files["student"], files["tokenizer"]
    assert convert(out, *given, "--image-size", "8") == 0
    facts = last_line(capsys)
    assert facts["class"] == student.pipeline.__name__ and len(facts["files"]) == 3
    assert {str(files[role]): name for role, name in student.called.items()}.items() <= facts["files"].items()
    assert set(facts["parameters"]) == {"transformer", "vq_model", "teacher"}
    loaded = quiet(load_pipeline(out))
    direct = quiet(
        student.pipeline.from_official(files["student"], files["tokenizer"], teacher=files["teacher"])
    )
    for pipe in (loaded, direct):
        assert type(pipe) is student.pipeline and pipe.sampler.config["steps"] == 2
        assert pipe.image_size == (8, 8) and pipe.facts.stored_as == "canvas" and not pipe.comparable
    for settings in ({"steps": 2}, {"steps": 2, "teacher_from": student.teacher_from}):
        loaded.sampler = direct.sampler = make_sampler("distilled", **settings)
        asked = student.law if "teacher_from" in settings else {}
        one, two = (
            pipe(student.label, generator=seeded(1), output_type="latent", **asked).images
            for pipe in (loaded, direct)
        )
        assert torch.equal(one, two) and one.shape == (1, *student.canvas)


@pytest.mark.parametrize("family", ["VAR"])
def test_published_figures_with_a_teacher_choose_where_codes_end(files):
    more: Any = DistilledScalePipeline.from_official(
        files["student"], files["tokenizer"], first_continuous=30
    )
    tokens = more(4, generator=seeded(1), output_type="latent").tokens
    assert (tokens[0, :, None] == more.vq_model.codebook).all(-1).any(-1).all()


@EVERY
def test_a_student_alone_becomes_a_model_and_the_command_draws(family, files, tmp_path, capsys):
    assert convert(tmp_path / "one", files["student"]) == 0
    assert (
        STUDENTS[family].model.from_pretrained(tmp_path / "one").grid.num_tokens
        == {"LlamaGen": 16, "VAR": 30}[family]
    )
    assert convert(tmp_path / "pair", files["student"], files["tokenizer"]) == 0
    drawn = ["generate", "3", "--model", str(tmp_path / "pair"), "--out", str(tmp_path / "pictures")]
    assert cli.main([*drawn, "--sampler", "distilled:steps=1"]) == 0
    assert len([*(tmp_path / "pictures").glob("*.png")]) == 1
    assert "lossy" in capsys.readouterr().out


REFUSED = {
    "LlamaGen": [
        (["student", "teacher"], [], "given without their tokenizer; pass vq_ds16_c2i.pt too"),
        (["student"], ["--image-size", "8"], "image_size=8 given, but .* draws 64 pixels"),
    ],
    "VAR": [
        (["student", "teacher"], [], "given without their tokenizer; pass vae_ch160v4096z32.pth too"),
        (["student", "other"], [], "vq_tiny.pt is not of DD1 student of VAR"),
    ],
}
BY_ALL = [
    (["student", "student"], [], "are both of one kind"),
    (["student", "tokenizer"], ["--image-size", "64"], "image_size=64 given, but .* draws 8 pixels"),
    (["student", "tokenizer"], ["--text-encoder", "t5"], "text_encoder=t5 given for"),
]


@pytest.mark.parametrize(
    ("family", "names", "more", "message"),
    [(each, *row) for each in REFUSED for row in BY_ALL + REFUSED[each]],
)
def test_files_that_make_no_pipeline_are_refused(files, tmp_path, capsys, names, more, message):
    out = tmp_path / "out"
    assert convert(out, *(files[name] for name in names), *more) == 2
    assert re.search(message, capsys.readouterr().err) and not out.exists()


def test_it_is_saved_with_parts_of_another_pipeline_and_measured(tmp_path, monkeypatch):
    pipe, home = text_student_pipeline(steps=2), tmp_path
    for part, owned in (
        ("vq_model", "vq_model"),
        ("text_encoder", "text_encoder"),
        ("teacher", "transformer"),
    ):
        getattr(pipe, part).save_pretrained(home / "shapes" / owned)
    round_matrices(pipe.transformer, home / "trained")
    (home / "trained" / "training.json").write_text("{}\n")
    assemble(RECIPES["shapes_distilled"], {"transformer": home / "trained"}, home / "student")
    folder = home / "student"
    assert json.loads((folder / "shared.json").read_text()) == {
        "vq_model": "shapes",
        "text_encoder": "shapes",
        "teacher": "shapes/transformer",
    }
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert held == {
        "model_index.json",
        "shared.json",
        "sampler/sampler_config.json",
        *(f"transformer/{name}" for name in ("config.json", "training.json")),
        "transformer/diffusion_pytorch_model.safetensors",
    }
    assert part_folder(folder, "teacher") == home / "shapes" / "transformer"
    assert describe(folder)["pipeline"] == "DistilledTextImagePipeline"
    loaded = quiet(load_pipeline(folder))
    assert type(loaded) is DistilledTextImagePipeline and isinstance(loaded.transformer, LlamaGenStudent)
    for settings in ({"steps": 2}, {"steps": 2, "teacher_from": 2}):
        loaded.sampler = pipe.sampler = make_sampler("distilled", **settings)
        asked: dict[str, Any] = {"guidance_scale": 1.5} if "teacher_from" in settings else {}
        one, two = (
            each(PROMPTS, generator=seeded(3, 4), output_type="latent", **asked) for each in (loaded, pipe)
        )
        assert torch.equal(one.tokens, two.tokens)
    settings = settings_of_model(str(folder))
    law = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    assert settings.plain == "distilled" and settings.law == law
    assert settings.others == ("distilled:steps=2", "distilled:steps=2,teacher_from=0")
    for owner in ("shapes/../shapes", "shapes/", "/shapes", "shapes/transformer/more", ".."):
        (folder / "shared.json").write_text(json.dumps({"teacher": owner}))
        refuses(ValueError, r"shared\.json.*teacher=", load_pipeline, folder)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (class_student_pipeline, 1),
        (scale_student_pipeline, 1),
        (lambda: text_student_pipeline(teacher=False), PROMPTS),
    ],
    ids=["classes", "scales", "captions"],
)
def test_a_law_and_a_teacher_that_are_not_there_are_refused(make, asked):
    pipe = make()
    for name, value in (("guidance_scale", 3.0), ("temperature", 0.5)):
        refuses(ValueError, f"{name}={value}.*alone", pipe, asked, **{name: value})
    pipe.sampler = make_sampler("distilled", steps=2, teacher_from=1)
    refuses(ValueError, r"teacher_from=1.*pipe\.teacher", pipe, asked)


@pytest.mark.parametrize("family", ["LlamaGen"])
def test_parts_of_others_are_refused(files, tmp_path):
    pipe, sampler = class_student_pipeline(), make_sampler("distilled")
    with pytest.raises(ValueError, match="4 numbers.*3"):
        DistilledImagePipeline(pipe.transformer, tiny_vq_model(codebook_dim=3), sampler)
    with pytest.raises(ValueError, match="TokenGrid"):
        small = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1, grid_size=3)
        DistilledImagePipeline(pipe.transformer, pipe.vq_model, sampler, teacher=small)
    with pytest.raises(ValueError, match="text-conditional"):
        DistilledImagePipeline.from_official(
            files["student"], files["tokenizer"], teacher=write_text_model(tmp_path)
        )
    scales: Any = scale_student_pipeline()
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 4\).*9.*2"):
        DistilledScalePipeline(scales.transformer, tiny_var_vq(codebook_size=9), sampler)
    with pytest.raises(ValueError, match=r"\(1, 2, 4\).*12.*2"):
        DistilledScalePipeline(
            scales.transformer, scales.vq_model, sampler, teacher=tiny_var(scales=(1, 2, 4))
        )
    words = text_student_pipeline(teacher=False)
    parts = words.vq_model, words.text_encoder, sampler
    classes = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1)
    with pytest.raises(ValueError, match="class-conditional"):
        DistilledTextImagePipeline(words.transformer, *parts, teacher=classes)
    with pytest.raises(ValueError, match="DistilledImagePipeline"):
        DistilledTextImagePipeline(tiny_student(torch.float32), *parts)
    with pytest.raises(ValueError, match="DistilledTextImagePipeline"):
        DistilledImagePipeline(words.transformer, words.vq_model, sampler)
    with pytest.raises(ValueError, match=r"DistilledImagePipeline\.from_official"):
        DistilledTextImagePipeline.from_official("llamagen-L.pt", "vq_ds16_c2i.pt")
