"""What pipelines say about themselves, loaded and saved, beside what they do."""

from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.pipelines import ALL
from tests.helpers.tiny import tiny_pipeline, tiny_vq_model
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_infinity import tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import tiny_scale_pipeline, tiny_var, tiny_var_vq
from tests.helpers.tiny_students import tiny_student, tiny_var_student
from visual_spec.models.next_scale.scale_budget import ScaleBudget
from visual_spec.pipelines import base
from visual_spec.pipelines.accelerate import accelerate, restore
from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models
from visual_spec.pipelines.infinity import InfinityPipeline
from visual_spec.pipelines.loading import read_facts
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler, read_sampler, write_sampler
from visual_spec.pipelines.texts import Texts
from visual_spec.prototype.students.image_pipelines import DistilledImagePipeline
from visual_spec.prototype.students.scale_pipeline import DistilledScalePipeline
from visual_spec.records import PipelineFacts
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, Schedule
from visual_spec.samplers.registry import all_samplers
from visual_spec.samplers.scales.scales import ScaleWiseSampler

MASKED = "masked:steps=4/2/2,span=3,clock=magnet,filtered_score=true"


def masked_pipeline() -> Any:
    sampler = MaskedSampler(
        (4, 2, 2), span=3, schedule=Schedule(clock="magnet"), choice=Choice(filtered_score=True)
    )
    return tiny_audio_pipeline(
        sampler, masked=True, reach=4, default_guidance_scale=2.0, default_temperature=1.7
    )


def infinity_pipeline() -> Any:
    return InfinityPipeline(tiny_infinity(), tiny_bits(), None, ScaleWiseSampler(ramp=False))


def tiny_students() -> Any:
    return DistilledImagePipeline(tiny_student(torch.float32), tiny_vq_model(), make_sampler("distilled"))


def tiny_students_of_scales() -> Any:
    sampler = make_sampler("distilled", steps=2, teacher_from=1)
    return DistilledScalePipeline(
        tiny_var_student(torch.float32), tiny_var_vq(), sampler, teacher=tiny_var(0, torch.float32)
    )


def facts(
    medium: str, unit: str, calls: tuple[str, ...], plain: str, fast: str, *law: float, **more: Any
) -> Any:
    """Of a default law: guidance, temperature, top-k, top-p."""
    names = ("guidance_scale", "temperature", "top_k", "top_p")
    return PipelineFacts(medium, unit, calls, plain, fast, dict(zip(names, law, strict=True)), **more)


STUDENT = ("image", "tokens", ("distilled",), "distilled", "distilled")
ALONE: Any = dict(comparable=False, stored_as="canvas")
RASTER = ("raster", "tree", "order", "own order")
EXPECTED = {
    "tokens": (
        tiny_pipeline,
        facts("image", "tokens", RASTER, "autoregressive", "speculative-jacobi", 3.0, 1.0, 0, 1.0),
    ),
    "scales": (
        tiny_scale_pipeline,
        facts(
            "image",
            "scales",
            ("scales",),
            "scale-wise:num_draft_scales=all",
            "scale-wise",
            2.5,
            1.0,
            900,
            0.96,
        ),
    ),
    "bits": (
        infinity_pipeline,
        facts(
            "image", "scales", ("scales",), "scale-wise:ramp=false", "scale-wise", 4.0, 0.5, 0, 0.97, **ALONE
        ),
    ),
    "students": (tiny_students, facts(*STUDENT, 1.0, 1.0, 0, 1.0, **ALONE)),
    "students of scales": (tiny_students_of_scales, facts(*STUDENT, 3.0, 1.0, 900, 1.0, **ALONE)),
    "columns": (
        tiny_audio_pipeline,
        facts("audio", "columns", ("columns",), "columns", "columns", 3.0, 1.0, 0, 1.0),
    ),
    "masked": (
        masked_pipeline,
        facts("audio", "columns", ("masked",), MASKED, "masked", 2.0, 1.7, 0, 1.0, comparable=False),
    ),
}


@pytest.mark.parametrize("kind", ALL)
def test_a_call_reads_its_facts_and_its_texts_once(kind, monkeypatch):
    """And a call with the same settings reads no facts again, one with other settings does."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(base, "family_of")
    counted(Texts, "__post_init__")
    pipe = ALL[kind].make()
    counts.clear()
    pipe._facts = None
    ALL[kind].ask(pipe)
    texts = {"__post_init__": 1} if "text_encoder" in pipe.components else {}
    assert counts == {"family_of": 1, **texts}
    ALL[kind].ask(pipe)
    assert counts["family_of"] == 1
    setting = "default_guidance_scale" if "default_guidance_scale" in pipe.config else "frame_rate"
    pipe.register_to_config(**{setting: 1.75})
    ALL[kind].ask(pipe)
    assert counts["family_of"] == 2


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_pipeline_says_what_it_is_loaded_and_saved(kind, tmp_path):
    make, expected = EXPECTED[kind]
    pipe = make()
    assert pipe.facts == expected
    assert (pipe.medium, pipe.unit, pipe.calls) == (expected.medium, expected.unit, expected.calls)
    assert (pipe.plain_sampler, pipe.fast_sampler) == (expected.plain_sampler, expected.fast_sampler)
    assert (pipe.comparable, pipe.stored_as) == (expected.comparable, expected.stored_as)
    assert pipe.default_settings() == expected.default_settings
    pipe.save_pretrained(tmp_path)
    assert read_facts(tmp_path) == expected


@pytest.mark.parametrize("kind", EXPECTED)
def test_its_plain_and_its_fast_sampler_fit(kind):
    pipe = EXPECTED[kind][0]()
    for text in (pipe.plain_sampler, pipe.fast_sampler):
        pipe.sampler = read_sampler(text)
        pipe.check_sampler()
    plain = next(entry for entry in all_samplers() if entry.plain and entry.calls in pipe.calls)
    assert parse_sampler(pipe.plain_sampler)[0] == plain.name


def test_the_default_settings_are_the_law_of_a_call_that_names_none():
    for make in (tiny_pipeline, tiny_students, tiny_scale_pipeline, tiny_audio_pipeline, masked_pipeline):
        pipe: Any = make()
        law = pipe.make_law()
        assert {name: getattr(law, name) for name in pipe.default_settings()} == pipe.default_settings()
    for law in infinity_pipeline().make_laws():
        assert (law.guidance_scale, law.temperature, law.top_k, law.top_p) == (4.0, 0.5, 0, 0.97)


def test_facts_follow_the_settings_and_the_sampler():
    pipe = tiny_scale_pipeline()
    pipe.sampler = ScaleWiseSampler(smooth=True)
    assert pipe.stored_as == "canvas"  # the ids do not tell a smooth picture
    model = pipe.transformer
    pipe.compress(ScaleBudget.from_share(model.scales, model.config["num_layers"], 0.7))
    assert pipe.plain_sampler == "scale-wise:num_draft_scales=all,cache_share=off"


def test_text_of_a_sampler_is_read_as_it_was_written():
    settings = {"a": 1, "b": 0.25, "c": True, "d": None, "e": [4, 2], "f": [4], "g": "word"}
    text = write_sampler("name", settings)
    assert text == "name:a=1,b=0.25,c=true,d=none,e=4/2,f=4/,g=word"
    assert parse_sampler(text) == ("name", settings)
    assert write_sampler("name", {}) == "name" and parse_sampler("name") == ("name", {})


def test_numbers_of_relaxed_acceptance_reach_the_sampler():
    sampler = make_sampler("speculative-jacobi", coupling="maximal", acceptance="lantern", delta=0.2)
    held = dict(sampler.config)
    assert (held.get("relaxation") or held)["delta"] == 0.2


def test_accelerating_a_pipeline_without_a_faster_sampler_keeps_its_own():
    for pipe in (
        masked_pipeline(),
        infinity_pipeline(),
    ):  # the settings of their samplers belong to their laws
        own = pipe.sampler
        assert accelerate(pipe).sampler is own and restore(pipe).sampler is own


@pytest.mark.parametrize("name", embedded_models())
def test_what_an_embedded_model_answers_is_known_without_loading_it(name):
    assert describe(embedded_folder(name))["calls"] == read_facts(name).calls
