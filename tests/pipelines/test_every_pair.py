"""Every sampler on every embedded model: it draws, or it is refused in one line before any compute."""

import functools
from typing import Any

import pytest
import torch

from tests.helpers.tiny import quiet
from visual_spec.pipelines.accelerate import accelerate, refusals, restore
from visual_spec.pipelines.embedded import describe, embedded_folder, embedded_models
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.registry import CHUNKS, DISTILLED, all_samplers, fit

pytestmark = pytest.mark.every_set

PROMPTS = {"image": "a red circle", "video": "a red circle moves right", "audio": "a calm tune"}
# What a model of these calls cannot be decoded by, though both speak of the same calls: the pairs that no table of
# kinds can tell, each by the part that stands in the way.
MISFITS = {
    ("shapes", "multiscale"): "EagleDrafter",
    ("tunes_masked", "speculative-masked"): "4 codebooks",
    ("tunes_masked", "self-speculative-masked"): "4 codebooks",
    ("shapes_masked", "self-speculative-masked"): "causal_layer",
    **{
        (model, sampler): "final_noise=0"
        for model in ("shapes_causal", "shapes_mar")
        for sampler in ("speculative-continuous", "continuous-jacobi")
    },
}


@functools.cache
def pipeline(name: str) -> Any:
    return quiet(load_pipeline(name))


def two_calls(pipe: Any, **settings: Any) -> Any:
    """What is there after two calls of the model."""
    prompt = "0" if getattr(pipe, "num_classes", None) else PROMPTS[pipe.medium]

    def stop(pipe: Any, step: int, timestep: int, kwargs: dict[str, Any]) -> None:
        pipe._interrupt = step >= 1

    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, callback_on_step_end=stop, **settings)


def no_compute(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a model was called before the refusal")


@pytest.mark.parametrize("entry", all_samplers(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("name", embedded_models())
def test_a_sampler_draws_or_is_refused_where_it_is_set(
    name: str, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = pipeline(name)
    before = getattr(pipe, "sampler", None)
    with monkeypatch.context() as still:
        still.setattr(torch.nn.Module, "__call__", no_compute)
        try:
            accelerate(pipe, entry.name)
        except (TypeError, ValueError) as refusal:
            said = str(refusal)
            assert "\n" not in said and MISFITS.get((name, entry.name), "") in said
            assert getattr(pipe, "sampler", None) is before and not hasattr(
                pipe, "_visual_spec_plain_sampler"
            )
            return
    assert (name, entry.name) not in MISFITS
    try:
        guided = {} if {DISTILLED, CHUNKS} & set(pipe.calls) else {"guidance_scale": 3.0}
        for settings in ({}, guided):
            two_calls(pipe, **settings)
            assert pipe.last_trace.sampler == entry.class_name
    finally:
        restore(pipe)
    assert pipe.sampler is before


@pytest.mark.parametrize("name", embedded_models())
def test_the_table_of_samplers_and_models_says_what_a_pipeline_says(name: str) -> None:
    """All pairs: "yes" is accepted and "-" is refused; what is refused beyond kinds of calls is "+ part"."""
    pipe = pipeline(name)
    before, said = pipe.sampler, refusals(pipe)
    assert pipe.sampler is before and list(said) == [entry.name for entry in all_samplers()]
    for entry in all_samplers():
        cell = fit(describe(embedded_folder(name))["calls"], entry)
        assert cell != "-" or said[entry.name], entry.name
        assert cell != "yes" or not said[entry.name], (entry.name, said[entry.name])
        assert MISFITS.get((name, entry.name), "") in said[entry.name]


@pytest.mark.parametrize("name", embedded_models())
def test_the_fitting_samplers_of_a_model_draw(name: str) -> None:
    """A refusal of everything would pass the test above."""
    pipe = pipeline(name)
    accelerate(pipe)
    try:
        two_calls(pipe)
        assert pipe.last_trace is not None
    finally:
        restore(pipe)
