"""`accelerate` on transformers models: what the user calls, what comes back, and that nothing is left behind."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.pipelines.glm_image.pipeline_glm_image import GlmImagePipeline
from transformers import DynamicCache, GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.pipelines.base import Pipeline

import visual_spec
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.transformers_models import GRIDS, GUIDED, INPUTS, MAKE, MODELS, SETTINGS, draw
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.models.core.transformers_cache import CACHE
from visual_spec.models.next_token.chameleon_vq import ChameleonVQDecoder
from visual_spec.pipelines.accelerate import accelerate, restore, summary
from visual_spec.pipelines.accelerate.arguments import read_request
from visual_spec.pipelines.accelerate.images import law_of
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


@pytest.fixture(params=MAKE)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("guided", [True, False])
def test_the_jacobi_sampler_returns_the_autoregressive_ids(name, guided):
    model = MODELS[name]
    want = draw(model, name, AutoregressiveSampler(), guided=guided)
    assert torch.equal(draw(model, name, SpeculativeJacobiSampler(6), guided=guided), want)
    assert len(want.unique(dim=0)) == 3


def test_restore_leaves_the_model_bit_identical(name):
    model = MAKE[name]()
    names, state = set(vars(model)), copy.deepcopy(model.state_dict())
    config, settings = model.config.to_dict(), model.generation_config.to_dict()
    ids = INPUTS[name]["input_ids"]

    def forward() -> torch.Tensor:
        return model(input_ids=ids, attention_mask=INPUTS[name]["attention_mask"]).logits

    with torch.no_grad():
        before = forward()
        draw(model, name, SpeculativeJacobiSampler(6))
        assert set(vars(model)) == names
        assert torch.equal(forward(), before)
    assert model.config.to_dict() == config and model.generation_config.to_dict() == settings
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_offloaded_model_draws_the_same(name):
    model, sampler = MAKE[name](), SpeculativeJacobiSampler(5)
    want = draw(model, name, sampler)
    # Weights come in when a module is called.
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(offloaded.parameters()).is_meta
    assert torch.equal(draw(offloaded, name, sampler), want)


def test_restore_puts_back_what_the_user_had_hung_on_the_model():
    model = tiny.janus()
    own = model.generate = lambda *args, **kwargs: "mine"
    accelerate(model, SpeculativeJacobiSampler(4))
    accelerate(model, AutoregressiveSampler())  # again: the sampler is swapped
    assert isinstance(model.sampler, AutoregressiveSampler)
    assert model.generate(torch.ones(1, 3).long()) == "mine"  # text stays with what was there
    assert restore(model) is model and model.generate is own
    assert not hasattr(model, "sampler") and restore(model) is model


def test_a_saved_model_draws_the_same(name, tmp_path):
    model = MODELS[name]
    accelerate(model, AutoregressiveSampler())
    try:
        model.save_pretrained(tmp_path)  # while it is accelerated
    finally:
        restore(model)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    sampler = SpeculativeJacobiSampler(5)
    assert torch.equal(draw(again, name, sampler), draw(model, name, sampler))


def test_a_draft_model_of_the_same_class(name):
    """A drafter of the same weights is always right: every call commits all its drafts, and one token more."""
    model = MODELS[name]
    want = draw(model, name, AutoregressiveSampler())
    sampler = DraftedSampler(num_drafts=3, acceptance="identical")
    accelerate(model, sampler, drafter=model)
    settings = SETTINGS | (dict(guidance_scale=GUIDED[name]) if GUIDED[name] else {})
    try:
        got = model.generate_images(**INPUTS[name], **settings, generator=seeded(1, 2, 3))
        calls = int(model.last_trace.target_calls.max())
    finally:
        restore(model)
    assert torch.equal(got, want)
    assert calls <= -(-model_tokens(name) // 4) + 2


def model_tokens(name: str) -> int:
    return {"janus": 16, "chameleon": 16, "lumina": 24, "emu3": 15, "glm": 21}[name]


def test_janus_generate_is_routed_for_pictures_only():
    model = tiny.janus()
    inputs = INPUTS["janus"]
    text = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    want = model.generate(**inputs, generation_mode="image", do_sample=False)
    accelerate(model, SpeculativeJacobiSampler(8))
    got = model.generate(**inputs, generation_mode="image", do_sample=False)
    assert torch.equal(got, want)
    assert int(model.last_trace.target_calls.min()) < 16
    positional = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_mode="image"
    )
    assert torch.equal(positional, want)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), text)
    pictures = model.decode_images(got)
    assert torch.equal(pictures, model.decode_image_tokens(got).permute(0, 3, 1, 2).clamp(-1, 1))


def test_several_pictures_of_a_prompt_stand_beside_each_other(name):
    model = accelerate(MODELS[name], SpeculativeJacobiSampler(5))
    settings = SETTINGS | (dict(guidance_scale=GUIDED[name]) if GUIDED[name] else {})
    try:
        twice = model.generate_images(
            **INPUTS[name], **settings, num_return_sequences=2, generator=seeded(1, 4, 2, 5, 3, 6)
        )
        once = [
            model.generate_images(**INPUTS[name], **settings, generator=seeded(*s))
            for s in [(1, 2, 3), (4, 5, 6)]
        ]
    finally:
        restore(model)
    assert torch.equal(twice, torch.stack(once, 1).flatten(0, 1))


def test_glm_image_is_accelerated_inside_its_pipeline():
    """The calls of diffusers' pipeline: `generate` with the processor's output, then the large grid cut out."""
    model = tiny.glm_image()

    class Pipe:
        components = {"vision_language_encoder": model, "scheduler": object(), "tokenizer": None}

    pipe = Pipe()
    inputs = INPUTS["glm"]
    count, offset, height, width = GlmImagePipeline._compute_generation_params(GRIDS, is_text_to_image=True)

    def prior_tokens() -> torch.Tensor:
        torch.manual_seed(5)
        outputs = model.generate(**inputs, max_new_tokens=count, do_sample=True)
        return torch.stack(
            [
                GlmImagePipeline._extract_large_image_tokens(
                    outputs[row : row + 1], 7, offset, height * width
                )
                for row in range(3)
            ]
        )

    assert accelerate(pipe, AutoregressiveSampler()) is pipe
    want = prior_tokens()
    accelerate(pipe, SpeculativeJacobiSampler(6))
    assert torch.equal(prior_tokens(), want)
    assert want.shape == (3, 15) and want.max() < 24
    trace = model.last_trace
    assert summary(pipe) == trace.summary() and "3 x 21 tokens" in summary(pipe)
    assert trace.commit_call.shape == (3, 21)
    assert (trace.commit_call[:, 6:].min(1).values > trace.commit_call[:, :6].max(1).values).all()
    assert restore(pipe) is pipe and "generate" not in vars(model)
    assert summary(pipe) == "Pipe: not accelerated"
    assert summary(accelerate(pipe, AutoregressiveSampler())).endswith(
        "Sampler, the same tokens; nothing decoded yet"
    )


def test_pixels():
    torch.manual_seed(0)
    decoder = ChameleonVQDecoder(32, (1, 2), 1, 8, 24, 8).double()
    more = {"chameleon": dict(vq_decoder=decoder), "emu3": dict(image_sizes=[[3, 5]] * 3), "janus": {}}
    more["lumina"] = dict(vq_decoder=decoder, layout="lumina-mgpt", image_sizes=(4, 6))
    sizes = {"chameleon": (8, 8), "lumina": (8, 12), "emu3": (6, 10), "janus": (8, 8)}
    for kind, inputs in more.items():
        model = accelerate(MODELS[kind], SpeculativeJacobiSampler(6))
        try:
            ids = model.generate_images(**INPUTS[kind], return_dict_in_generate=True)
            pictures = model.decode_images(ids, **inputs)
        finally:
            restore(model)
        assert pictures.shape == (3, 3, *sizes[kind]) and pictures.abs().max() <= 1
        assert torch.equal(pictures, pictures.clamp(-1, 1)) and pictures.std() > 0


@pytest.mark.parametrize(
    "settings",
    [
        dict(do_sample=True),  # top_k is 50 then
        dict(do_sample=True, temperature=0.7, top_k=5),
        dict(do_sample=True, top_k=0, top_p=0.8),
        dict(do_sample=True, temperature=1.3, top_k=30, top_p=0.9, guidance_scale=2.5),
        dict(do_sample=True, top_k=None),  # none then
        dict(do_sample=True, temperature=None, top_p=None),
    ],
)
def test_the_law_is_the_one_generate_samples_from(settings):
    """Against transformers' own chain of processors."""
    model = MODELS["emu3"]
    scores = 2 * torch.randn(4, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    config, _ = model._prepare_generation_config(None, **settings)
    scale, config.guidance_scale = config.guidance_scale, None
    processors = model._get_logits_processor(
        config, input_ids_seq_length=3, logits_processor=LogitsProcessorList()
    )
    mixed = scores if scale is None else scores[2:] + scale * (scores[:2] - scores[2:])
    want = processors(torch.zeros(len(mixed), 3).long(), mixed.clone()).softmax(-1)
    law = law_of(read_request(model, None, settings, "Emu3", ()).config, 1.0)
    got = law(scores[:, None], law.guided)[:, 0].exp()
    assert (got - want).abs().max() < 1e-12


def test_greedy_unless_told_otherwise():
    assert (
        law_of(GenerationConfig(), 5.0).temperature == 0
        and law_of(GenerationConfig(), 5.0).guidance_scale == 5
    )


def test_lengths_of_the_picture_are_no_restriction():
    model = accelerate(MODELS["janus"], SpeculativeJacobiSampler(5))
    lengths = dict(max_length=23, max_new_tokens=16, min_new_tokens=16, min_length=23, use_cache=True)
    try:
        want = model.generate_images(**INPUTS["janus"], do_sample=False)
        assert torch.equal(model.generate_images(**INPUTS["janus"], do_sample=False, **lengths), want)
    finally:
        restore(model)


def test_a_call_that_goes_on_from_a_cache_is_text():
    """Also where `image_sizes` stays in the call."""
    model, (ids, mask) = MODELS["emu3"], (INPUTS["emu3"][key] for key in ("input_ids", "attention_mask"))
    told: dict[str, Any] = dict(do_sample=False, max_new_tokens=5, attention_mask=mask)

    def gone_on(**more: Any) -> torch.Tensor:
        cache = {CACHE: DynamicCache(config=model.config.text_config)}
        with torch.no_grad():
            model.model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True, **cache)
        return model.generate(input_ids=ids, **told, **cache, **more)

    want = gone_on()
    accelerate(model)
    try:
        assert torch.equal(gone_on(image_sizes=[[3, 5]] * 3), want)
    finally:
        restore(model)


class PeftModel(torch.nn.Module):
    """What `accelerate` uses of PEFT's."""

    def __init__(self, model: Any, learns_a_prompt: bool = False) -> None:
        super().__init__()
        self.base_model = model
        self.active_peft_config = SimpleNamespace(is_prompt_learning=learns_a_prompt)

    def get_base_model(self) -> Any:
        return self.base_model


class WholePipeline(Pipeline):
    """A pipeline of transformers, all but its way through."""

    _sanitize_parameters = preprocess = _forward = postprocess = None  # pyright: ignore

    def __init__(self, model: Any) -> None:
        self.model = model


def test_models_are_found_inside_what_wraps_them():
    model, sampler = tiny.janus(), SpeculativeJacobiSampler(5)
    pipeline = WholePipeline(torch.compile(model, backend="eager"))
    holder = SimpleNamespace(components={"generator": PeftModel(model), "scheduler": None})
    wrappers = torch.compile(model, backend="eager"), PeftModel(model), pipeline, holder
    names = set(vars(model))  # newer versions of PyTorch mark a module that is compiled
    for wrapper in wrappers:
        assert visual_spec.accelerate(wrapper, sampler) is wrapper
        assert model.sampler is sampler and "nothing decoded yet" in visual_spec.summary(wrapper)
        assert visual_spec.restore(wrapper) is wrapper
        assert set(vars(model)) == names
    refuses(TypeError, "PeftModel", visual_spec.accelerate, PeftModel(model, learns_a_prompt=True), sampler)


# -- what is refused -------------------------------------------------------------------------------------------------


class OwnSampler:
    """A sampler of a user, which says the least that is asked for."""

    lossless = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return AutoregressiveSampler()(*args, **kwargs)


def test_a_sampler_of_a_user_draws() -> None:
    model = MODELS["janus"]
    expected = draw(model, "janus", AutoregressiveSampler())
    assert draw(model, "janus", OwnSampler()).equal(expected)
    accelerate(model, OwnSampler())
    try:
        assert "OwnSampler, the same law; nothing" in summary(model)
        model.generate_images(**INPUTS["janus"], **SETTINGS)  # without a generator
        assert "16 tokens" in summary(model)
    finally:
        restore(model)


def test_other_objects_and_samplers_are_refused():
    supported = (
        "ChameleonForConditionalGeneration, Emu3ForConditionalGeneration, GlmImageForConditionalGeneration"
    )
    with pytest.raises(
        TypeError, match=f"cannot accelerate a Linear; .*{supported}, MammothModa2, JanusForCond"
    ):
        accelerate(torch.nn.Linear(2, 2), AutoregressiveSampler())
    for sampler in (object(), ColumnJacobiSampler()):
        refuses(TypeError, "AutoregressiveSampler", accelerate, MODELS["janus"], sampler)
    assert "generate_images" not in vars(MODELS["janus"])


@pytest.mark.parametrize(
    ("kind", "inputs", "error", "message"),
    [
        ("janus", dict(image_sizes=(4, 4)), TypeError, "Janus.*image_sizes"),
        ("emu3", dict(image_size=(4, 4)), TypeError, "image_size.*image_sizes, pixel_values"),
        ("janus", dict(negative_prompt_ids=torch.ones(3, 2).long()), TypeError, "negative_prompt_ids"),
        ("glm", dict(guidance_scale=3.0), ValueError, "guidance_scale"),
        ("emu3", dict(guidance_scale=0.5), ValueError, "guidance_scale=0.5; pass 1"),
        ("janus", dict(num_beams=4), ValueError, "num_beams=4"),
        ("janus", dict(repetition_penalty=1.1), ValueError, r"repetition_penalty=1\.1"),
        ("janus", dict(output_scores=True), ValueError, "output_scores=True"),
        ("janus", dict(logits_processor=[min]), ValueError, r"logits_processor=\[<built-in function min>\]"),
        ("glm", dict(max_new_tokens=20), ValueError, "max_new_tokens=20.*21"),
        ("janus", dict(max_length=22), ValueError, "max_length=22.*16.*7"),
        ("janus", dict(min_new_tokens=17), ValueError, "min_new_tokens=17.*16"),
        ("janus", dict(min_length=24), ValueError, "min_length=24.*16"),
        ("emu3", dict(cache_implementation="quantized"), ValueError, "cache_implementation='quantized'"),
        ("emu3", dict(max_time=1.0), ValueError, r"max_time=1\.0"),
        ("emu3", dict(stop_strings="."), ValueError, r"stop_strings='\.'"),
        ("chameleon", dict(attention_mask=None), ValueError, "input_ids.*attention_mask"),
        ("chameleon", dict(input_ids=None), TypeError, "input_ids"),
        ("emu3", dict(image_sizes=[[3, 5], [3, 5], [3, 4]]), ValueError, r"\[3, 5\], \[3, 4\]"),
        (
            "emu3",
            dict(negative_prompt_ids=torch.ones(2, 2).long(), guidance_scale=2.0),
            ValueError,
            "3 and 2 prompts",
        ),
        ("emu3", dict(generator=seeded(1, 2)), ValueError, "2 generators.*3"),
        ("emu3", dict(drafter=torch.nn.Linear(2, 2)), TypeError, "Linear.*Emu3ForConditionalGeneration"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(kind, inputs, error, message):
    model = accelerate(MODELS[kind], SpeculativeJacobiSampler(4))
    try:
        refuses(error, message, model.generate_images, **{**INPUTS[kind], **inputs})
    finally:
        restore(model)
