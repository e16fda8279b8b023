"""Janus against its own `generate`; see `test_cached_decoder` for what all families share."""

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.next_token.tiny_transformers import janus, one, prompts
from visual_spec.models.core.transformers_cache import Prompt
from visual_spec.models.next_token.janus import JanusImageModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

MODEL = janus()
INPUTS = prompts([6, 4, 7, 3], low=6, high=48, pad=0, last=3, first=1)


def plan(inputs, *, guided):
    return JanusImageModel.plan(MODEL, Prompt(inputs["input_ids"], inputs["attention_mask"]), guided=guided)


@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_greedy_tokens_are_those_of_generate(scale):
    native = MODEL.generate(**INPUTS, generation_mode="image", do_sample=False, guidance_scale=scale)
    image_model, condition = plan(INPUTS, guided=True)
    law = TokenLaw(temperature=0.0, guidance_scale=scale)
    got = AutoregressiveSampler()(image_model, condition, law=law, batch_size=4)
    assert torch.equal(image_model.output(condition, got.tokens), native)
    assert len(native.unique()) > 4  # no constant picture
    for row in range(4):
        alone, condition = plan(one(INPUTS, row), guided=True)
        assert torch.equal(AutoregressiveSampler()(alone, condition, law=law).tokens[0], native[row])


def test_greedy_tokens_without_guidance_are_those_of_a_plain_loop():
    """`generate` always guides; without guidance the reference is the whole sequence run anew for every token."""
    image_model, condition = plan(INPUTS, guided=False)
    got = AutoregressiveSampler()(image_model, condition, law=TokenLaw(temperature=0.0), batch_size=4).tokens
    for row in range(4):
        ids = one(INPUTS, row)["input_ids"]
        embedded = MODEL.get_input_embeddings()(ids)
        for slot in range(16):
            hidden = MODEL.model.language_model(inputs_embeds=embedded).last_hidden_state[:, -1]
            token = MODEL.model.generation_head(hidden).argmax(-1)
            assert token == got[row, slot]
            embedded = torch.cat([embedded, MODEL.prepare_embeddings_for_image_generation(token[:, None])], 1)


def test_pixels_are_those_of_the_model():
    tokens = torch.randint(0, 24, (2, 16))
    pictures = JanusImageModel.pixels(MODEL, tokens)
    assert pictures.shape == (2, 3, 8, 8)
    assert torch.equal(pictures, MODEL.model.vqmodel.decode(tokens).clamp(-1, 1))


def test_guidance_without_the_ids_it_needs_is_refused():
    model = janus()
    model.generation_config.generation_kwargs = None
    prompt = Prompt(INPUTS["input_ids"], INPUTS["attention_mask"])
    refuses(ValueError, "boi", JanusImageModel.plan, model, prompt, guided=True)


def test_guidance_without_an_unconditional_prompt_is_refused():
    image_model, condition = plan(INPUTS, guided=False)
    with pytest.raises(ValueError, match="guidance.*Janus"):
        image_model.prefill(condition, batch_size=4, guided=True, window=1)
    refuses(ValueError, "4 prompts.*2", image_model.prefill, condition, batch_size=2, guided=False, window=1)
    with pytest.raises(TypeError, match="ImagePrompt"):
        image_model.prefill(condition.prompt, batch_size=4, guided=False, window=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), TypeError, r"torch\.float32"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4), ValueError, "one shape"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 1, 1]]), ValueError, "left"),
    ],
)
def test_bad_prompts_are_refused(ids, mask, error, message):
    refuses(error, message, Prompt, ids, mask)


def test_an_attention_that_takes_no_mask_is_refused():
    model = janus()
    model.model.language_model.config._attn_implementation = "flash_attention_2"
    refuses(ValueError, "attn_implementation='flash_attention_2'", JanusImageModel, model)
