"""Under `accelerate` a model takes every argument of its own `generate` that changes nothing, and gives the same."""

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

import visual_spec
from tests.helpers.diffusers_video import SMALL, tiny_pipeline
from tests.helpers.musicgen import FRAMES
from tests.helpers.refusals import refuses
from tests.helpers.tiny_audio import tiny_musicgen
from tests.helpers.tiny_wan import prompts as embeddings
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_transformers import prompts
from visual_spec.models.core.transformers_cache import CACHE
from visual_spec.pipelines.accelerate.arguments import NEUTRAL, read_request

# Prompts of one length: nothing is padding.
CALLS: dict[str, dict[str, Any]] = {
    "janus": prompts([6, 6], low=6, high=48, pad=0, last=3, first=1)
    | dict(generation_mode="image", do_sample=False),
    "emu3": prompts([6, 6], low=50, high=62, pad=1, last=62, first=0)
    | dict(image_sizes=[[2, 3]] * 2, do_sample=False, max_new_tokens=11),
    "musicgen": dict(
        input_ids=torch.tensor([[3, 4, 5], [6, 7, 8]]), do_sample=False, max_new_tokens=FRAMES + 3
    ),
}
MODELS = {"janus": tiny.janus(), "emu3": tiny.emu3(), "musicgen": tiny_musicgen()}
VALUES: dict[str, list[Any]] = {
    "cache_implementation": ["static"],
    "generation_config": [GenerationConfig()],
    "logits_processor": [[], LogitsProcessorList()],
    "stopping_criteria": [[], StoppingCriteriaList()],
    "synced_gpus": [False],
    "use_cache": [False],
}
USUAL = GenerationConfig._get_default_generation_params()
THEIRS = ("input_ids", "inputs", "do_sample", "max_new_tokens", "max_length", "image_sizes")


def names_of(kind: str) -> list[str]:
    """What `generate` takes by name: its own arguments, those of the model's forward, and all settings."""
    model = MODELS[kind]
    own = [inspect.signature(method).parameters for method in (type(model).generate, type(model).forward)]
    names = (
        {name for parameters in own for name in parameters} | set(GenerationConfig().to_dict()) | set(USUAL)
    )
    return sorted(name for name in names - {"self", "kwargs", *THEIRS} if name[0] != "_")


def constrained(kind: str, model: Any) -> dict[str, Any]:
    """What Emu3's own `generate` needs beside to draw a picture: the next token of the layout, or any picture token."""
    if kind != "emu3":
        return {}
    ends = model.config.vocabulary_map
    fixed = {
        3: ends["<|extra_200|>"],
        7: ends["<|extra_200|>"],
        8: ends["<|extra_201|>"],
        9: ends["<|image end|>"],
    }

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        place = len(ids) - 6
        return [fixed[place]] if place in fixed else [2] if place > 9 else list(range(20, 44))

    return {"prefix_allowed_tokens_fn": allowed}


def plainly(kind: str, **more: Any) -> Any:
    """What the model gives without `accelerate`; None where it refuses."""
    model = MODELS[kind]
    call = CALLS[kind] | constrained(kind, model)
    call.pop("image_sizes", None)
    try:
        return model.generate(**call | more)
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError):
        return None


WANTED = {kind: plainly(kind) for kind in CALLS}


@pytest.mark.parametrize("kind", CALLS)
def test_all_arguments_may_be_none_at_once(kind):
    needed = {"attention_mask", "generation_mode", "pad_token_id", "bos_token_id", "decoder_start_token_id"}
    model = visual_spec.accelerate(MODELS[kind])
    try:
        got = model.generate(**{name: None for name in names_of(kind) if name not in needed} | CALLS[kind])
    finally:
        visual_spec.restore(model)
    assert got.shape == WANTED[kind].shape and (got - WANTED[kind]).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CALLS for name in names_of(kind)])
def test_neutral_arguments_pass(kind, name):
    if (kind, name) == ("emu3", "prefix_allowed_tokens_fn"):
        pytest.skip("without it transformers draws no picture of Emu3")
    want, model = WANTED[kind], MODELS[kind]
    values = [None, *([USUAL[name]] if name in USUAL else []), *VALUES.get(name, [])]
    visual_spec.accelerate(model)
    try:
        for value in values:
            if same(kind, {name: copy.copy(value)}):  # Janus adds processors to the list that it is given
                got = model.generate(**CALLS[kind] | {name: value})
                assert got.shape == want.shape and (got - want).abs().max() < 1e-9, value
    finally:
        visual_spec.restore(model)


def same(kind: str, more: dict[str, Any]) -> bool:
    """Whether the model alone takes this, and gives what it gave."""
    hung = dict(vars(MODELS[kind]))
    visual_spec.restore(MODELS[kind])
    try:
        plain = plainly(kind, **more)
    finally:
        vars(MODELS[kind]).update(hung)
    return plain is not None and plain.shape == WANTED[kind].shape and torch.equal(plain, WANTED[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_most_arguments_are_neutral_without(kind):
    """Else the test above would compare nothing."""
    taken = [name for name in names_of(kind) if same(kind, {name: None})]
    assert len(taken) > 60 and {"streamer", CACHE, "position_ids"} & set(names_of(kind)) <= set(taken)


OTHERS = {
    "cache_implementation": "quantized",
    "early_stopping": True,
    "watermarking_config": WatermarkingConfig(),
}


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_other_values_are_refused_by_name(name):
    model = visual_spec.accelerate(MODELS["janus"])
    try:
        with pytest.raises(ValueError, match=f"{name}=.*not supported"):
            model.generate(**CALLS["janus"] | {name: OTHERS.get(name, [object()])})
    finally:
        visual_spec.restore(model)


def test_arguments_may_stand_without_their_names():
    call = dict(CALLS["janus"])
    model = visual_spec.accelerate(MODELS["janus"])
    try:
        got = model.generate(call.pop("input_ids"), call.pop("attention_mask"), LogitsProcessorList(), **call)
        assert torch.equal(got, WANTED["janus"])
        refuses(TypeError, "input_ids", model.generate, CALLS["janus"]["input_ids"], **CALLS["janus"])
        refuses(TypeError, "Janus.*input_ids", model.generate, **CALLS["janus"], spam=1)
    finally:
        visual_spec.restore(model)


def test_a_cache_may_be_declined():
    model = visual_spec.accelerate(MODELS["janus"])
    try:
        assert torch.equal(model.generate(**CALLS["janus"], use_cache=False), WANTED["janus"])
    finally:
        visual_spec.restore(model)


@pytest.mark.parametrize("shape", [(6,), (2, 0)])
def test_prompts_of_another_shape_are_refused_by_it(shape):
    model = visual_spec.accelerate(MODELS["janus"])
    try:
        with pytest.raises(
            ValueError, match=rf"shape \({shape[0]}, ?{'' if len(shape) == 1 else shape[1]}\)"
        ):
            model.generate(torch.ones(shape, dtype=torch.long), generation_mode="image", do_sample=False)
    finally:
        visual_spec.restore(model)


def test_a_class_of_samplers_is_no_sampler():
    model = tiny.janus()
    names = set(vars(model))
    refuses(TypeError, "TreeSampler.*TreeSampler", visual_spec.accelerate, model, visual_spec.TreeSampler)
    assert set(vars(model)) == names


NONE: dict[str, Any] = dict(top_k=None, top_p=None, temperature=None)


@pytest.mark.every_set
@pytest.mark.parametrize(
    "passed, asked, want",
    [
        (None, {}, dict(do_sample=True, top_k=1, temperature=0.5, max_new_tokens=7)),
        (dict(top_k=0), {}, dict(do_sample=True, top_k=0, temperature=0.5)),
        (dict(do_sample=False), {}, dict(do_sample=False, top_k=1)),
        (dict(top_k=9), dict(top_k=4), dict(top_k=4, temperature=0.5)),
        (dict(top_k=9, temperature=0.7), dict(top_k=0, do_sample=False), dict(top_k=0, temperature=0.7)),
        (dict(top_k=9, max_length=20), dict(do_sample=False), dict(do_sample=False, top_k=9, max_length=20)),
        (dict(top_k=9, top_p=0.3), NONE, dict(top_k=0, top_p=1.0, temperature=1.0)),
    ],
)
def test_a_call_stands_over_its_config_and_that_over_the_models(passed, asked, want):
    own = GenerationConfig(do_sample=True, top_k=1, temperature=0.5, max_new_tokens=7)
    before = own.to_dict()
    config = None if passed is None else GenerationConfig(**passed)
    request = read_request(SimpleNamespace(generation_config=own), config, asked, "a model", ())
    assert {name: getattr(request.config, name) for name in want} == want
    assert request.asked == {name: getattr(request.config, name) for name in asked}
    assert own.to_dict() == before


def test_the_models_own_settings_stand_under_a_config_that_is_passed():
    model = tiny_musicgen()
    model.generation_config.guidance_scale = 3.0
    call = {name: value for name, value in CALLS["musicgen"].items() if name == "input_ids"}
    for config in (GenerationConfig(max_length=14), GenerationConfig(max_new_tokens=9), None):
        want = model.generate(**call, generation_config=config)
        visual_spec.accelerate(model)
        got = model.generate(**call, generation_config=config)
        visual_spec.restore(model)
        assert got.shape == want.shape and (got - want).abs().max() < 1e-9


WAN: dict[str, list[Any]] = {
    "guidance_scale": [1.0],
    "callback_on_step_end_tensor_inputs": [["latents"]],
    "attention_kwargs": [{}],
}


def test_a_wan_takes_neutral_arguments():
    """Its own call all that it did, and says that it is not accelerated; `generate_video` whatever means nothing."""
    pipe = tiny_pipeline()
    request: Any = dict(prompt_embeds=embeddings(1).float(), output_type="latent", **SMALL)
    own: Any = dict(guidance_scale=1.0, num_inference_steps=1)

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    plain = pipe(**request, **own, generator=seed()).frames
    visual_spec.accelerate(pipe)
    want = pipe.generate_video(**request, generator=seed()).frames
    parameters = inspect.signature(type(pipe).__call__).parameters
    for name in parameters.keys() - {"self", "generator", *request}:
        usual = parameters[name].default
        for value in [*WAN.get(name, []), *([None] if usual is None else []), *([1] if usual == 1 else [])]:
            with pytest.warns(UserWarning, match="not accelerated.*pipe.generate_video"):
                assert torch.equal(pipe(**{**request, **own, name: value}, generator=seed()).frames, plain)
            assert torch.equal(pipe.generate_video(**{**request, name: value}, generator=seed()).frames, want)
    assert torch.equal(pipe.generate_video(**request, return_dict=False, generator=seed())[0], want)
    for name, value in {
        "guidance_scale": 5.0,
        "negative_prompt": "blurred",
        "num_inference_steps": 50,
    }.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}.*not supported"):
            pipe.generate_video(**request, **{name: value})
    assert np.isfinite(want.numpy()).all()


def test_text_of_a_chameleon_is_not_accelerated_and_says_so():
    model = tiny.chameleon()
    inputs = prompts([6, 6], low=68, high=80, pad=1, last=70, first=0)
    want = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    visual_spec.accelerate(model)
    with pytest.warns(UserWarning, match="text.*generate_images"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), want)


@pytest.mark.parametrize("sampler", ["tree", "drafted", "multiscale"])
def test_samplers_without_their_parts_are_refused_at_once(sampler):
    model, small = tiny.janus(), tiny.janus()
    names = set(vars(model))
    refuses(ValueError, "needs (a drafter|the codebook)", visual_spec.accelerate, model, sampler)
    assert set(vars(model)) == names
    if sampler != "multiscale":
        visual_spec.accelerate(model, sampler, drafter=small)
        ids = model.generate(**CALLS["janus"])
        assert torch.equal(ids, WANTED["janus"]) and model.last_trace.sampler.lower().startswith(sampler)
    with pytest.raises(TypeError, match="Linear.*JanusForConditionalGeneration"):
        visual_spec.accelerate(model, "tree", drafter=torch.nn.Linear(2, 2))


def test_what_nobody_takes_is_refused_with_the_names_of_all_that_are():
    with pytest.raises(TypeError) as caught:
        visual_spec.accelerate(torch.nn.Linear(2, 2))
    for name in ("Janus", "MusicgenMelody", "VibeVoice", "PocketTTS", "Chameleon"):
        assert f"{name}ForConditionalGeneration" in str(caught.value)
    assert "WanPipeline" in str(caught.value)
