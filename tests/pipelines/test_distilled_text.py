"""Pictures of prompts by a student of captions: one call, two, and the teacher; saved, shared and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from scripts.assemble import RECIPES, assemble
from tests.helpers.distilled_pipelines import text_student_pipeline
from tests.helpers.tiny import quiet, seeded, tiny_transformer
from tests.helpers.tiny_students import SIDE, SIZE, tiny_student
from visual_spec.eval.defaults import settings_of_model
from visual_spec.models.next_token.llamagen_student import LlamaGenStudent
from visual_spec.pipelines.distilled_image import DistilledImagePipeline, DistilledTextImagePipeline
from visual_spec.pipelines.embedded import describe, part_folder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training.loop import round_matrices

PROMPTS = ["a red circle", "a large blue square"]


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


def test_the_teacher_draws_from_the_prompt_with_its_guidance():
    pipe = text_student_pipeline(steps=2, teacher_from=0)
    found = pipe(PROMPTS, generator=seeded(3, 4), output_type="latent", guidance_scale=1.4)
    plain = AutoregressiveSampler()(
        pipe.teacher, pipe.make_condition(PROMPTS), law=TokenLaw(1.4), generator=seeded(3, 4), batch_size=2
    )
    kept = SIZE["restart"]
    assert torch.equal(found.tokens[:, :kept], pipe.vq_model.quantize.codes[plain.tokens[:, :kept]])


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
        with pytest.raises(
            ValueError, match="shared.json says teacher=.* the name of a folder beside it, or that"
        ):
            load_pipeline(folder)


def test_what_does_not_fit_is_refused_by_name():
    pipe = text_student_pipeline(teacher=False)
    with pytest.raises(ValueError, match="guidance_scale=3.* the student draws alone"):
        pipe(PROMPTS, guidance_scale=3.0)
    pipe.sampler = make_sampler("distilled", steps=2, teacher_from=2)
    with pytest.raises(
        ValueError, match="teacher_from=2, and this pipeline has no teacher; set pipe.teacher"
    ):
        pipe(PROMPTS)
    parts = pipe.vq_model, pipe.text_encoder, make_sampler("distilled")
    classes = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1)
    with pytest.raises(
        ValueError, match="the teacher is class-conditional, and this student, which draws captions"
    ):
        DistilledTextImagePipeline(pipe.transformer, *parts, teacher=classes)
    with pytest.raises(ValueError, match="draws from class labels; use DistilledImagePipeline"):
        DistilledTextImagePipeline(tiny_student(torch.float32), *parts)
    with pytest.raises(ValueError, match="draws from captions; use DistilledTextImagePipeline"):
        DistilledImagePipeline(pipe.transformer, pipe.vq_model, make_sampler("distilled"))
    with pytest.raises(ValueError, match="released students draw class labels; use DistilledImagePipeline"):
        DistilledTextImagePipeline.from_official("llamagen-L.pt", "vq_ds16_c2i.pt")
