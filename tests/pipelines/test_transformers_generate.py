"""`custom_generate` of transformers: the ids of an accelerated model, by a callable, a folder, and a saved model."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

import visual_spec
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_audio import tiny_musicgen
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_languages import CODES, END, language_model, texts
from tests.models.next_token.tiny_transformers import prompts
from visual_spec.pipelines.transformers_generate import generate
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

GRIDS = torch.tensor([[1, 3, 5], [1, 2, 3]])
INPUTS: dict[str, dict[str, Any]] = {
    "janus": prompts([6, 4, 7], low=6, high=48, pad=0, last=3, first=1),
    "chameleon": prompts([6, 4, 7], low=68, high=80, pad=1, last=70, first=0),
    "emu3": prompts([6, 4, 7], low=50, high=62, pad=1, last=62, first=0) | dict(image_sizes=[[3, 5]] * 3),
    "glm": prompts([6, 4, 7], low=30, high=50, pad=50, last=26, first=31)
    | dict(image_grid_thw=GRIDS.repeat(3, 1), images_per_sample=torch.tensor([2] * 3)),
}
MAKE = {"janus": tiny.janus, "chameleon": tiny.chameleon, "emu3": tiny.emu3, "glm": tiny.glm_image}
SAMPLING: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=10, top_p=0.95)


@pytest.fixture(params=MAKE)
def name(request) -> str:
    return request.param


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """Where transformers copies the code of folders to."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def accelerated(model: Any, inputs: dict[str, Any], **settings: Any) -> tuple[torch.Tensor, list[int]]:
    """The ids and calls of `accelerate`, which is undone."""
    visual_spec.accelerate(model, "speculative-jacobi:window=6")
    try:
        ids = model.generate_images(**inputs, **SAMPLING, **settings, generator=seeded(1, 2, 3))
        return ids, model.last_trace.target_calls.tolist()
    finally:
        visual_spec.restore(model)


@pytest.mark.parametrize("guided", [True, False])
def test_a_callable_draws_what_an_accelerated_model_draws(name, guided):
    model, scale = MAKE[name](), 3.0 if guided else 1.0
    if name == "glm" and guided:
        pytest.skip("GLM-Image has no guidance")
    inputs, own = INPUTS[name], {"guidance_scale": scale}
    want, calls = accelerated(model, inputs, **own)
    here = {"image_guidance_scale": scale} if name == "janus" else own
    more = dict(custom_generate=visual_spec.custom_generate, window=6, generator=seeded(1, 2, 3))
    assert torch.equal(model.generate(**inputs, **SAMPLING, **here, **more), want)
    assert model.last_trace.target_calls.tolist() == calls and max(calls) > 2
    plain = dict(more, sampler=AutoregressiveSampler(), generator=seeded(1, 2, 3))
    del plain["window"]
    assert torch.equal(model.generate(**inputs, **SAMPLING, **here, **plain), want)
    assert not hasattr(model, "sampler")


def test_a_folder_draws_what_an_accelerated_model_draws(name, tmp_path):
    model, scale = MAKE[name](), {} if name == "glm" else {"guidance_scale": 3.0}
    want, calls = accelerated(model, INPUTS[name], **scale)
    here = {"image_guidance_scale": 3.0} if name == "janus" else scale
    folder = visual_spec.save_custom_generate(tmp_path / "code")
    given = dict(custom_generate=str(folder), trust_remote_code=True, window=6, generator=seeded(1, 2, 3))
    assert torch.equal(model.generate(**INPUTS[name], **SAMPLING, **here, **given), want)
    assert model.last_trace.target_calls.tolist() == calls


def test_a_saved_model_brings_its_own_generate(name, tmp_path):
    model, scale = MAKE[name](), {} if name == "glm" else {"guidance_scale": 3.0}
    want, _ = accelerated(model, INPUTS[name], **scale)
    model.save_pretrained(tmp_path / "model")
    folder = visual_spec.save_custom_generate(tmp_path / "model")
    again = type(model).from_pretrained(folder, trust_remote_code=True, dtype=model.dtype)
    inputs = dict(INPUTS[name])
    ids = inputs.pop("input_ids")  # by position, as to any `generate`
    drawn = again.generate(ids, **inputs, **SAMPLING, **scale, window=6, generator=seeded(1, 2, 3))
    assert torch.equal(drawn, want)


def test_pictures_of_one_prompt_follow_each_other():
    model, inputs = tiny.emu3(), INPUTS["emu3"]
    generators = seeded(1, 2, 3, 4, 5, 6)
    visual_spec.accelerate(model)
    want = model.generate_images(**inputs, **SAMPLING, num_return_sequences=2, generator=generators)
    visual_spec.restore(model)
    given = dict(custom_generate=visual_spec.custom_generate, num_return_sequences=2)
    inputs = inputs | dict(image_sizes=[[3, 5]])
    drawn = model.generate(**inputs, **SAMPLING, **given, generator=seeded(1, 2, 3, 4, 5, 6))
    assert torch.equal(drawn, want)


@pytest.mark.parametrize("window", [None, 6])
def test_a_saved_musicgen_brings_its_own_generate(window, tmp_path):
    model = tiny_musicgen(1)
    settings: Any = dict(input_ids=IDS, attention_mask=MASK, max_new_tokens=20, do_sample=True, top_k=6)
    sampler = "columns" if window is None else ColumnJacobiSampler(window=window)
    visual_spec.accelerate(model, sampler)
    want = model.generate_audio(**settings, generator=seeded(1, 2, 3))
    codes, calls = model.last_codes, model.last_trace.target_calls.tolist()
    visual_spec.restore(model)
    assert torch.equal(generate(**settings, model=model, window=window, generator=seeded(1, 2, 3)), want)
    model.save_pretrained(tmp_path)
    folder, dtype = visual_spec.save_custom_generate(tmp_path), next(model.parameters()).dtype
    again = type(model).from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    played = again.generate(**settings, window=window, generator=seeded(1, 2, 3))
    assert torch.equal(again.last_codes, codes) and again.last_trace.target_calls.tolist() == calls
    torch.testing.assert_close(played, want)  # the codec may round by where its weights lie


@pytest.mark.parametrize(
    ("version", "needed"), [("0.2.0", "visual-spec>=0.2.0"), ("0.2.0.dev0", "visual-spec")]
)
def test_the_folder_names_what_it_needs(tmp_path, monkeypatch, version, needed):
    """transformers cannot read versions in development."""
    monkeypatch.setattr(visual_spec, "__version__", version)
    folder = visual_spec.save_custom_generate(tmp_path) / "custom_generate"
    assert (folder / "requirements.txt").read_text().strip() == needed
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny.janus().generate(**INPUTS["janus"], custom_generate=str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(window=4, sampler="autoregressive"), "window=4.*sampler='autoregressive'"),
        (dict(window=0), "window=0"),
        (dict(sampler="masked"), "MaskedSampler"),
        (dict(num_beams=2), "num_beams=2"),
        (dict(prefix_allowed_tokens_fn=lambda batch, ids: [1]), "prefix_allowed_tokens_fn|PrefixConstrained"),
        (dict(repetition_penalty=1.5), "RepetitionPenalty|repetition_penalty=1.5"),
        (dict(seed=1), "seed"),
    ],
)
def test_what_no_sampler_knows_is_refused(given, named):
    for hook in (visual_spec.custom_generate, None):
        call = tiny.emu3().generate if hook else lambda **more: generate(model=tiny.emu3(), **more)
        own = {"custom_generate": hook} if hook else {}
        refuses((TypeError, ValueError), named, call, **INPUTS["emu3"], **SAMPLING, **own, **given)


TINY_T5: Any = dict(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
TEXTS: Any = dict(max_new_tokens=20, do_sample=True, temperature=0.8, top_k=9, pad_token_id=0)


def written(model: Any, generator: Any, **settings: Any) -> tuple[torch.Tensor, list[int]]:
    """The ids and calls of an accelerated language model."""
    visual_spec.accelerate(model, "speculative-jacobi:window=6", codes=CODES, end=END)
    try:
        ids = model.generate(**texts([7, 4, 9]), **TEXTS, **settings, generator=generator)
        return ids, model.last_trace.target_calls.tolist()
    finally:
        visual_spec.restore(model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "settings",
    [{}, dict(repetition_penalty=1.4, no_repeat_ngram_size=3, min_new_tokens=5), dict(guidance_scale=2.0)],
    ids=["nothing", "rules", "guidance"],
)
def test_a_language_model_of_codes_writes_what_an_accelerated_one_writes(kind, settings, tmp_path):
    model = language_model(kind)
    if "guidance_scale" in settings:
        other = texts([3, 2, 3], seed=1)
        names = {"input_ids": "negative_prompt_ids", "attention_mask": "negative_prompt_attention_mask"}
        settings = settings | {names[name]: value for name, value in other.items()}
    want, calls = written(model, seeded(1, 2, 3), **settings)
    own: Any = dict(codes=CODES, end=END, window=6)
    hook = dict(custom_generate=visual_spec.custom_generate, generator=seeded(1, 2, 3))
    assert torch.equal(model.generate(**texts([7, 4, 9]), **TEXTS, **settings, **own, **hook), want)
    assert model.last_trace.target_calls.tolist() == calls and "sampler" not in vars(model)

    folder = visual_spec.save_custom_generate(tmp_path / "code")
    hook = dict(custom_generate=str(folder), trust_remote_code=True, generator=seeded(1, 2, 3))
    assert torch.equal(model.generate(**texts([7, 4, 9]), **TEXTS, **settings, **own, **hook), want)

    model.save_pretrained(tmp_path / "model")
    folder = visual_spec.save_custom_generate(tmp_path / "model")
    again = type(model).from_pretrained(folder, trust_remote_code=True, dtype=model.dtype)
    drawn = again.generate(**texts([7, 4, 9]), **TEXTS, **settings, **own, generator=seeded(1, 2, 3))
    assert torch.equal(drawn, want)


def test_a_processor_of_the_user_is_heard():
    class Odd(LogitsProcessor):
        """Forbids even ids after an odd one."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            odd, even = input_ids[:, -1:] % 2 == 1, torch.arange(scores.shape[1]) % 2 == 0
            return scores.masked_fill(odd & even, -torch.inf)

    model, more = language_model("llama"), dict(logits_processor=LogitsProcessorList([Odd()]))
    want, _ = written(model, seeded(1, 2, 3), **more)
    hook = dict(custom_generate=visual_spec.custom_generate, codes=CODES, end=END, window=6)
    drawn = model.generate(**texts([7, 4, 9]), **TEXTS, **more, **hook, generator=seeded(1, 2, 3))
    assert torch.equal(drawn, want)
    assert not torch.equal(drawn, written(model, seeded(1, 2, 3))[0])


@pytest.mark.parametrize("kind", ["emu3"])
def test_the_prompt_that_guidance_leads_away_from_is_heard(kind):
    model, inputs = MAKE[kind](), INPUTS[kind]
    more: Any = dict(negative_prompt_ids=inputs["input_ids"][:, -3:] - 1, guidance_scale=3.0)
    more["negative_prompt_attention_mask"] = torch.ones_like(more["negative_prompt_ids"])
    want, _ = accelerated(model, inputs, **more)
    hook = dict(custom_generate=visual_spec.custom_generate, window=6, generator=seeded(1, 2, 3))
    assert torch.equal(model.generate(**inputs, **SAMPLING, **more, **hook), want)
    assert not torch.equal(accelerated(model, inputs, guidance_scale=3.0)[0], want)


def test_a_language_model_without_its_codes_is_refused():
    config = GenerationConfig(max_new_tokens=2, do_sample=True)
    with pytest.raises(TypeError, match="LlamaForCausalLM.*codes="):
        language_model("llama").generate(
            torch.ones(1, 2).long(), generation_config=config, custom_generate=visual_spec.custom_generate
        )
    with pytest.raises(TypeError, match="T5.*MusicgenForConditionalGeneration.*codes"):
        generate(torch.ones(1, 2).long(), model=T5ForConditionalGeneration(T5Config(**TINY_T5)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("window", [None, 6])
def test_a_janus_draws_the_sampled_pictures_of_its_own_generate_for_a_seed(window, count):
    model = tiny.janus()
    settings = dict(INPUTS["janus"], **SAMPLING, num_return_sequences=count)
    plainly = dict(generation_mode="image", guidance_scale=3.0)
    for seed in range(3):
        torch.manual_seed(seed)
        want, after = model.generate(**settings, **plainly), torch.rand(2)
        sampler = AutoregressiveSampler() if window is None else SpeculativeJacobiSampler(window)
        visual_spec.accelerate(model, sampler)
        torch.manual_seed(seed)
        got, ours_after = model.generate(**settings, **plainly), torch.rand(2)
        visual_spec.restore(model)
        assert torch.equal(got, want) and torch.equal(ours_after, after)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_custom_generate_writes_the_sampled_texts_of_generate_for_a_seed(kind):
    """Every id is a code here, so that `generate` needs no processor."""
    model = language_model(kind)
    size = model.get_output_embeddings().weight.shape[0]
    inputs, settings = texts([7, 7, 7]), dict(TEXTS, eos_token_id=END, num_return_sequences=2)
    torch.manual_seed(5)
    want = model.generate(**inputs, **settings)
    torch.manual_seed(5)
    own = dict(custom_generate=visual_spec.custom_generate, codes=(0, size), end=END, window=6)
    assert torch.equal(model.generate(**inputs, **settings, **own), want)
    assert model.last_trace.target_calls.min() < want.shape[1] - 7
