"""What users of diffusers expect of a pipeline, in the spirit of its own pipeline tests, of every kind of ours."""

import inspect
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks.layerwise_casting import apply_layerwise_casting
from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteScheduler
from PIL import Image

import visual_spec
from tests.helpers.odd_addresses import misplaced, put_at_odd_addresses
from tests.helpers.pipelines import ALL, KINDS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline, read_facts
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.registry import all_samplers, sampler_class


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=ALL)
def any_kind(request):
    return ALL[request.param]


def test_a_call_tells_its_guidance_and_its_length(kind):
    pipe = kind.make()
    default = pipe.default_settings()["guidance_scale"]
    assert (pipe.guidance_scale, pipe.num_timesteps) == (default, 0)
    seen = []
    kind.ask(
        pipe,
        guidance_scale=1.5,
        callback_on_step_end=lambda pipe, step, timestep, tensors: seen.append(
            (pipe.guidance_scale, pipe.num_timesteps, step)
        ),
    )
    guidance, lengths, steps = zip(*seen, strict=True)
    assert all(one in (1.5, [1.5] * len(one) if isinstance(one, list) else None) for one in guidance)
    assert len(set(lengths)) == 1 and lengths[0] >= pipe.num_timesteps == len(seen) > 0
    if pipe.unit == "scales":
        assert max(steps) + 1 == pipe.num_timesteps
    kind.ask(pipe)
    assert pipe.guidance_scale == ([default] * pipe.num_timesteps if seen[0][0] != 1.5 else default)


def test_a_call_has_as_many_timesteps_as_it_called_back(any_kind):
    pipe, steps = any_kind.make(), []
    any_kind.ask(pipe, callback_on_step_end=lambda pipe, step, *_: steps.append(step))
    assert pipe.num_timesteps == len(steps) > 0


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("masked captions", ""),
        ("masked classes", ""),
        ("masked music", ""),
        ("frames", ""),
        ("captions", "ordered:order=diagonal,allow_approximate=true"),
        ("latents", "continuous:steps=3"),
    ],
)
def test_a_callback_sees_every_timestep_where_a_call_makes_several_tokens(name, sampler):
    """As diffusers' own tests: guidance that grows by 1 at each step has grown by `num_timesteps` at the end."""
    kind = ALL[name]
    pipe, last = kind.make(), []
    if sampler:
        method, settings = parse_sampler(sampler)
        pipe.sampler = make_sampler(method, **settings)

    def grow(pipe, step, timestep, tensors):
        pipe._guidance_scale += 1.0
        last.append(step == pipe.num_timesteps - 1)
        return tensors

    kind.ask(pipe, guidance_scale=2.0, callback_on_step_end=grow)
    assert pipe.guidance_scale == 2.0 + pipe.num_timesteps
    assert last == [False] * (len(last) - 1) + [True]


@pytest.mark.parametrize("name", ["classes", "scales"])
def test_labels_go_by_their_names_in_diffusers(name):
    kind = KINDS[name]
    pipe = kind.make()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    want = pipe([3], num_images_per_label=2, generator=generators).tokens
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert pipe(class_labels=[3], num_images_per_prompt=2, generator=generators).tokens.equal(want)
    for given, message in [
        (dict(labels=3, class_labels=3), "class_labels"),
        ({}, "class_labels"),
        (
            dict(labels=3, num_images_per_label=1, num_images_per_prompt=1),
            "num_images_per_label.*num_images_per_prompt",
        ),
    ]:
        refuses(TypeError, message, pipe, **given)


def test_a_class_that_does_not_load_a_pipeline_names_the_one_that_does(tmp_path):
    with pytest.raises(
        ValueError, match=r"shapes_var.*ScaleImagePipeline.*visual_spec\.ScaleImagePipeline\.from_pretrained"
    ):
        ImagePipeline.from_pretrained("shapes_var")
    KINDS["captions"].make().save_pretrained(tmp_path)

    class Mine(ImagePipeline):
        pass

    assert isinstance(Mine.from_pretrained(tmp_path), Mine)


@pytest.mark.every_set
def test_another_class_names_the_one_that_loads_a_pipeline(any_kind, tmp_path):
    pipe = any_kind.make()
    pipe.save_pretrained(tmp_path)
    own = type(pipe).__name__
    other = ScaleImagePipeline if type(pipe) is ImagePipeline else ImagePipeline
    refuses(ValueError, f"{own}.*visual_spec.{own}.from_pretrained", other.from_pretrained, tmp_path)


def made_of(output: Any) -> tuple[Any, torch.Tensor]:
    """Pictures, clips or waves, and the tokens that they were made of."""
    if hasattr(output, "codes"):
        return output.audios, output.codes
    shown = output.frames if hasattr(output, "frames") else output.images
    return shown, output.latents if hasattr(output, "latents") else output.tokens


def test_every_call_takes_the_arguments_that_all_pipelines_take(kind):
    pipe = kind.make()
    given = inspect.signature(type(pipe).__call__).parameters
    common = {"generator", "output_type", "return_dict", "guidance_scale", kind.each}
    common |= {"callback_on_step_end", "callback_on_step_end_tensor_inputs"}
    if "text_encoder" in pipe.components:
        common |= {"prompt", "negative_prompt", "prompt_embeds", "prompt_attention_mask"}
        common |= {"negative_prompt_embeds", "negative_prompt_attention_mask"}
    assert common <= set(given)
    assert all(given[name].default is not inspect.Parameter.empty for name in common)


def test_a_tuple_holds_what_the_output_does(any_kind):
    pipe = any_kind.make()
    output, plain = any_kind.ask(pipe, seed=1), any_kind.ask(pipe, seed=1, return_dict=False)
    assert torch.equal(plain[0], made_of(output)[0])
    assert torch.equal(plain[2 if pipe.medium == "audio" else 1], made_of(output)[1])
    assert isinstance(plain, tuple) and len(plain) == len(output.to_tuple())


def test_all_output_types_are_of_the_same_picture_or_clip(any_kind):
    pipe = any_kind.make()
    tensor, array, latent = (any_kind.ask(pipe, seed=1, output_type=name) for name in ("pt", "np", "latent"))
    values = made_of(array)[0]
    assert isinstance(values, np.ndarray)
    if pipe.medium == "video":
        values = np.moveaxis(values, -1, 2)
    if pipe.medium == "image":
        values = np.moveaxis(values, -1, 1)
        (picture,) = any_kind.ask(pipe, seed=1, output_type="pil").images
        assert isinstance(picture, Image.Image) and picture.size == values.shape[:1:-1]
        assert np.abs(np.moveaxis(np.asarray(picture), -1, 0) / 255 - values[0]).max() <= 0.5 / 255 + 1e-6
    assert np.allclose(values, made_of(tensor)[0].numpy(), atol=1e-6)
    assert pipe.medium == "audio" or 0 <= values.min() <= values.max() <= 1
    assert torch.equal(made_of(latent)[1], made_of(tensor)[1])


def test_several_samples_of_each_and_each_alone(any_kind):
    pipe = any_kind.make().to(torch.float64)  # a wider product may round otherwise
    asked = [any_kind.asked] * 2
    seeds = range(4)
    together = pipe(asked, generator=seeded(*seeds), output_type="latent", **{any_kind.each: 2})
    tokens = made_of(together)[1]
    assert len(tokens) == 4
    for row, seed in enumerate(seeds):
        alone = pipe(any_kind.asked, generator=seeded(seed), output_type="latent")
        assert torch.allclose(made_of(alone)[1][0], tokens[row], rtol=1e-6, atol=1e-9)
    first, again = (
        made_of(pipe(asked, generator=seeded(5)[0], output_type="latent", **any_kind.settings))[1]
        for _ in "12"
    )  # one generator serves the batch
    assert first.equal(again) and not first[0].equal(first[1])


def test_guidance_changes_what_is_made(kind):
    pipe = kind.make()
    tokens = [made_of(kind.ask(pipe, seed=2, guidance_scale=scale))[1] for scale in (1.0, 7.5)]
    assert tokens[0].shape == tokens[1].shape and not torch.equal(*tokens)


def test_a_saved_pipeline_is_the_same_by_any_door(any_kind, tmp_path):
    pipe = any_kind.make()
    pipe.save_pretrained(tmp_path)
    want = made_of(any_kind.ask(pipe, seed=3))
    assert read_facts(tmp_path) == pipe.facts and put_at_odd_addresses(tmp_path) > 1
    for load in (type(pipe).from_pretrained, load_pipeline):
        loaded = quiet(load(tmp_path))
        assert type(loaded) is type(pipe) and settings_of(loaded) == settings_of(pipe)
        assert misplaced(*loaded.components.values()) == []  # also parts of diffusers and of transformers
        assert weights_of(loaded).keys() == weights_of(pipe).keys()
        assert all(torch.equal(weight, weights_of(loaded)[name]) for name, weight in weights_of(pipe).items())
        assert all(
            torch.equal(*pair) for pair in zip(made_of(any_kind.ask(loaded, seed=3)), want, strict=True)
        )


def weights_of(pipe: Any) -> dict[str, torch.Tensor]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.named_parameters()}


def settings_of(pipe: Any) -> dict[str, Any]:
    """What is saved of a pipeline and its sampler, but for paths and versions."""
    samplers = [pipe.sampler] if pipe.sampler is not None else []
    kept = {k: v for part in (pipe, *samplers) for k, v in part.config.items() if not k.startswith("_")}
    return json.loads(json.dumps(kept))  # tuples are saved as lists


@pytest.mark.every_set
def test_what_no_pipeline_can_do_is_refused_before_any_computation(any_kind, monkeypatch):
    pipe = any_kind.make()
    monkeypatch.setattr(pipe.transformer, "forward", lambda *_, **__: pytest.fail("it computed"))
    for given, error, message in (
        ({any_kind.each: 0}, ValueError, f"{any_kind.each}=0"),
        ({"output_type": "jpeg"}, ValueError, "output_type='jpeg'"),
        ({"generator": seeded(1, 2)}, ValueError, "2 generators for 1 "),
        ({"generator": 7}, TypeError, "generator is.*int"),
        ({"generator": [*seeded(1), 7], any_kind.each: 2}, TypeError, r"\[1\].*int.*torch\.Generator"),
        ({"callback_on_step_end": 3}, TypeError, "callback_on_step_end=3"),
        ({"callback_on_step_end_tensor_inputs": ["noise"]}, ValueError, "'noise'"),
        ({"guidance": 2.0}, TypeError, r"__call__\(\).*'guidance'"),
    ):
        refuses(error, message, pipe, any_kind.asked, **{**any_kind.settings, **given})
    taken = inspect.signature(type(pipe).__call__).parameters
    for name, value in (
        ("guidance_scale", math.nan),
        ("guidance_scale", -1.0),
        ("temperature", -0.5),
        ("top_k", -1),
        ("top_p", 0.0),
        ("height", 512),
        ("height", 0),
        ("width", 16),
    ):
        if name in taken:
            refuses(ValueError, f"{name}={value}", pipe, any_kind.asked, **{**any_kind.settings, name: value})


@pytest.mark.every_set
@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("captions", "speculative-jacobi:window=8"),
        ("video", "speculative-jacobi:window=8"),
        ("classes", "speculative-jacobi:window=8"),
        ("music", "column-jacobi"),
    ],
)
def test_what_an_accelerated_pipeline_makes_is_the_same_in_fewer_calls(name, sampler, guidance_scale):
    kind = KINDS[name]
    pipe, asked = kind.make(), {kind.each: 3, "guidance_scale": guidance_scale}
    own, plain = pipe.sampler, pipe(kind.asked, generator=seeded(1, 2, 3), output_type="pt", **asked)
    assert visual_spec.accelerate(pipe, sampler) is pipe
    fast = pipe(kind.asked, generator=seeded(1, 2, 3), output_type="pt", **asked)
    assert all(torch.equal(*pair) for pair in zip(made_of(plain), made_of(fast), strict=True))
    assert (fast.trace.target_calls < plain.trace.target_calls).all()
    assert len(made_of(plain)[1].unique(dim=0)) == 3
    assert visual_spec.summary(pipe).startswith(f"{type(pipe.sampler).__name__}: 3 x ")
    assert visual_spec.restore(pipe).sampler is own


@pytest.mark.every_set
def test_samplers_of_other_models_are_refused_and_change_nothing(any_kind):
    """One for each way of calling a model, and one of diffusers; what fits is named. Models refuse orders."""
    pipe, others = (
        any_kind.make(),
        {entry.calls: entry for entry in all_samplers() if "order" not in entry.calls},
    )
    own = pipe.sampler
    foreign = [sampler_class(entry)() for calls, entry in others.items() if calls not in pipe.calls]
    assert len(foreign) > 4
    for sampler in (EulerDiscreteScheduler(), *foreign):
        message = f"{type(sampler).__name__}.*{type(own).__name__}"
        refuses(TypeError, message, visual_spec.accelerate, pipe, sampler)
        assert pipe.sampler is own
        pipe.sampler = sampler
        refuses(TypeError, message, pipe, any_kind.asked, **any_kind.settings)
        pipe.sampler = own


@pytest.mark.every_set
def test_what_is_no_number_is_named_and_not_drawn(kind):
    pipe = kind.make()
    for weight in pipe.transformer.parameters():
        weight.data.fill_(math.nan)
    refuses(FloatingPointError, "slot|scale|sample", kind.ask, pipe)


def test_parts_that_may_be_missing_stay_missing(any_kind, tmp_path):
    pipe = any_kind.make()
    for name in set(pipe._optional_components) - {"codec"}:
        setattr(pipe, name, None)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    for name, part in pipe.components.items():
        assert (getattr(loaded, name) is None) == (part is None), name


def test_variants_are_saved_and_loaded(any_kind, tmp_path):
    pipe = any_kind.make()
    want = made_of(any_kind.ask(pipe, seed=3))[1]
    pipe.save_pretrained(tmp_path, variant="fp16")
    weights = list(tmp_path.rglob("*.safetensors"))
    assert weights and all(".fp16." in path.name for path in weights)
    loaded = quiet(type(pipe).from_pretrained(tmp_path, variant="fp16"))
    assert torch.equal(made_of(any_kind.ask(loaded, seed=3))[1], want)
    pipe.save_pretrained(tmp_path / "plain")
    refuses(ValueError, "variant=fp16", type(pipe).from_pretrained, tmp_path / "plain", variant="fp16")


def test_dtypes_by_component(any_kind, tmp_path):
    pipe = any_kind.make()
    pipe.save_pretrained(tmp_path)
    asked = {"transformer": torch.bfloat16, "default": torch.float64}
    loaded = type(pipe).from_pretrained(tmp_path, dtype=asked)
    for name, part in loaded.components.items():
        if isinstance(part, torch.nn.Module):
            assert part.dtype == asked.get(name, torch.float64), name


def test_weights_kept_in_eight_bits_draw_as_rounded_ones(kind):
    """Layerwise casting of diffusers stores weights in 8 bits, and casts those of a layer when it works."""
    cast, rounded = kind.make(), kind.make()
    apply_layerwise_casting(cast.transformer, torch.float8_e4m3fn, torch.float32)
    stored = {
        name for name, weight in cast.transformer.named_parameters() if weight.dtype == torch.float8_e4m3fn
    }
    assert len(stored) > 3
    for name, weight in rounded.transformer.named_parameters():
        if name in stored:
            weight.data = weight.data.to(torch.float8_e4m3fn).to(weight.dtype)
    for seed in (1, 2):
        got, want = (made_of(kind.ask(pipe, seed=seed)) for pipe in (cast, rounded))
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert next(w for n, w in cast.transformer.named_parameters() if n in stored).dtype == torch.float8_e4m3fn
