"""`accelerate` on transformers' MusicGen: what the user calls, what comes back, and that nothing is left behind."""

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import visual_spec
from tests.helpers.musicgen import CODES, FRAMES, IDS, MASK, native_codes
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded
from tests.helpers.tiny_audio import tiny_musicgen
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

SAMPLING: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=6, guidance_scale=2.0)


@pytest.fixture(params=[1, 2], ids=["mono", "stereo"])
def model(request):
    return tiny_musicgen(request.param)


def steps_of(model: Any) -> int:
    """What `generate` is to be asked for, for FRAMES frames."""
    return FRAMES + 4 // model.decoder.config.audio_channels - 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_audio_is_that_of_generate(model, batch, scale):
    settings: Any = dict(
        input_ids=IDS[-batch:],
        attention_mask=MASK[-batch:],
        max_new_tokens=steps_of(model),
        do_sample=False,
        guidance_scale=scale,
    )
    want = model.generate(**settings)
    codes = native_codes(
        model,
        steps_of(model),
        scale,
        input_ids=settings["input_ids"],
        attention_mask=settings["attention_mask"],
    )
    assert visual_spec.accelerate(model) is model and isinstance(model.sampler, ColumnAutoregressiveSampler)
    got = model.generate_audio(**settings)
    assert model.last_codes.equal(codes) and got.shape == want.shape
    assert (got - want).abs().max() < 1e-10
    routed = model.generate(settings.pop("input_ids"), **settings)  # as the user calls it, prompt by position
    assert routed.equal(got)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_jacobi_sampler_plays_what_plain_sampling_plays(model, batch):
    settings: Any = dict(input_ids=IDS[-batch:], attention_mask=MASK[-batch:], max_new_tokens=20, **SAMPLING)
    seeds = [1, 2, 3][:batch]
    visual_spec.accelerate(model, "columns")
    want = model.generate_audio(**settings, generator=seeded(*seeds))
    codes, plain = model.last_codes, model.last_trace
    assert visual_spec.summary(model).startswith("ColumnAutoregressiveSampler:")
    visual_spec.accelerate(model, ColumnJacobiSampler(window=6))
    assert model.generate_audio(**settings, generator=seeded(*seeds)).equal(want)
    assert model.last_codes.equal(codes) and len(codes.unique(dim=0)) == batch
    assert (model.last_trace.target_calls < plain.target_calls).all()


def test_a_clip_goes_on_as_in_generate(model):
    channels = model.decoder.config.audio_channels
    clip = torch.randn(3, channels, 12, generator=torch.Generator().manual_seed(2)).double()
    padding = torch.ones(3, channels, 12)
    padding[1, :, 8:] = 0  # a shorter clip
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK, do_sample=False, guidance_scale=3.0)
    audio = dict(input_values=clip, padding_mask=padding if channels == 2 else padding[:, 0])
    if channels == 2:  # of stereo transformers takes no mask
        clip[1, :, 8:] = 0
        del audio["padding_mask"]
    want = model.generate(**inputs, **audio, max_new_tokens=steps_of(model))
    visual_spec.accelerate(model)
    got = model.generate_audio(**inputs, **audio, max_new_tokens=steps_of(model))
    assert got.shape == want.shape and (got - want).abs().max() < 1e-10
    given = model.last_codes[..., :3].flatten(0, 1)
    start = torch.full((12, 1), CODES)
    for codes in (given, torch.cat([start, given], 1)):
        again = model.generate_audio(**inputs, decoder_input_ids=codes, max_new_tokens=steps_of(model))
        assert again.equal(got)
    assert len(given.unique()) > 3 and not given[4:8].equal(given[:4])


def test_lengths_are_those_of_generate(model):
    visual_spec.accelerate(model)
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK, do_sample=False)
    config = GenerationConfig(max_length=14)
    long = model.generate_audio(**inputs, max_length=14)
    by_config = model.generate_audio(**inputs, generation_config=config)  # a step more, in transformers 5.23
    by_default = model.generate_audio(**inputs)
    visual_spec.restore(model)
    assert (model.generate(**inputs, max_length=14) - long).abs().max() < 1e-10
    assert (model.generate(**inputs, generation_config=config) - by_config).abs().max() < 1e-10
    assert (model.generate(**inputs) - by_default).abs().max() < 1e-10


def test_unconditional_music(model):
    empty = model.get_unconditional_inputs(num_samples=2)
    want = model.generate(**empty, max_new_tokens=12, do_sample=False)
    visual_spec.accelerate(model)
    got = model.generate_audio(
        **model.get_unconditional_inputs(num_samples=2), max_new_tokens=12, do_sample=False
    )
    assert (got - want).abs().max() < 1e-10


def test_several_clips_of_a_prompt_stand_beside_each_other(model):
    visual_spec.accelerate(model)
    settings: Any = dict(input_ids=IDS[:2], attention_mask=MASK[:2], max_new_tokens=12, **SAMPLING)
    twice = model.generate_audio(**settings, num_return_sequences=2, generator=seeded(1, 4, 2, 5))
    once = [model.generate_audio(**settings, generator=seeded(*seeds)) for seeds in [(1, 2), (4, 5)]]
    assert (twice - torch.stack(once, 1).flatten(0, 1)).abs().max() < 1e-10
    output = model.generate_audio(**settings, generator=seeded(1, 2), return_dict_in_generate=True)
    assert output.sequences.equal(once[0])


def test_restore_leaves_the_model_as_it_was(model):
    names, state = set(vars(model)), copy.deepcopy(model.state_dict())
    settings = model.generation_config.to_dict()
    own = model.generate = lambda *_, **__: "mine"
    visual_spec.accelerate(model)
    visual_spec.accelerate(model, "columns")  # again: the sampler is swapped
    assert isinstance(model.sampler, ColumnAutoregressiveSampler)
    model.generate_audio(input_ids=IDS, attention_mask=MASK, max_new_tokens=12, **SAMPLING)
    assert visual_spec.restore(model) is model and model.generate is own
    del model.generate
    assert set(vars(model)) == names and model.generation_config.to_dict() == settings
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert visual_spec.restore(model) is model
    assert visual_spec.summary(model).endswith("not accelerated")


def test_what_does_not_fit_is_refused(model):
    refuses(TypeError, "SpeculativeJacobiSampler", visual_spec.accelerate, model, SpeculativeJacobiSampler())
    with pytest.raises(TypeError, match="MusicgenForCausalLM.*MusicgenForConditionalGeneration"):
        visual_spec.accelerate(model.decoder)
    assert "generate_audio" not in vars(model)
    visual_spec.accelerate(model)
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK)
    least = 4 // model.decoder.config.audio_channels
    for arguments, error, message in [
        (dict(inputs, max_new_tokens=least - 1), ValueError, r"\d+ \(max_new_tokens="),
        (dict(inputs, num_beams=2), ValueError, "num_beams=2"),
        (dict(inputs, cache_implementation="quantized"), ValueError, "cache_implementation='quantized'"),
        (dict(inputs, min_new_tokens=13), ValueError, "min_new_tokens=13.*12"),
        (dict(inputs, min_length=14), ValueError, "min_length=14.*13"),
        (dict(inputs, logits_processor=[min]), ValueError, r"logits_processor=\[<built-in function min>\]"),
        (dict(inputs, spam=1), TypeError, "MusicGen"),
        (
            dict(inputs, decoder_input_ids=torch.zeros(5, 2).long()),
            ValueError,
            r"pass \[12, P\]: 4 codebooks",
        ),
        (
            dict(inputs, decoder_input_ids=torch.zeros(12, 2).long(), input_values=torch.zeros(3, 1, 8)),
            TypeError,
            "input_values.*decoder_input_ids",
        ),
        ({}, TypeError, "input_ids.*encoder_outputs"),
    ]:
        refuses(error, message, model.generate_audio, **{"max_new_tokens": 12, **arguments})
