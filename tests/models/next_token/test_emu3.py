"""Emu3 against its own `generate`, constrained as its documentation does."""

from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.next_token.tiny_transformers import emu3, prompts
from visual_spec.models.core.transformers_cache import Prompt
from visual_spec.models.next_token.emu3 import Emu3ImageModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

MODEL = emu3()
INPUTS = prompts([6, 4, 7, 3], low=50, high=62, pad=1, last=62, first=0)  # 62: the picture starts
HEIGHT, WIDTH = 3, 5
NEGATIVE = prompts([4, 2, 5, 3], low=50, high=62, pad=1, last=61, first=0)


def native(inputs, **guidance) -> torch.Tensor:
    """`generate` with the constraint of the documentation: it counts from the last token of the prompt."""
    image_ids = MODEL.model.vocabulary_mapping.image_tokens

    def allowed(_, ids):
        offset = len(ids) - int((ids == 62).nonzero()[0])
        if offset % (WIDTH + 1) == 0:
            return [9]
        return {1: [10], 2: [11], 3: [2]}.get(offset - (WIDTH + 1) * HEIGHT, image_ids)

    return MODEL.generate(
        **inputs, max_new_tokens=100, do_sample=False, prefix_allowed_tokens_fn=allowed, **guidance
    )


def plan(inputs, **more):
    prompt = Prompt(inputs["input_ids"], inputs["attention_mask"])
    return Emu3ImageModel.plan(MODEL, prompt, image_sizes=[[HEIGHT, WIDTH]] * 4, **more)


@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["last token", "negative prompt"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_tokens_are_those_of_generate(scale, negative):
    guidance: dict[str, Any] = {} if scale == 1 else dict(guidance_scale=scale)
    other = None
    if negative is not None and scale > 1:
        guidance |= dict(
            negative_prompt_ids=negative["input_ids"],
            negative_prompt_attention_mask=negative["attention_mask"],
        )
        other = Prompt(negative["input_ids"], negative["attention_mask"])
    want = native(INPUTS, **guidance)
    image_model, condition = plan(INPUTS, guided=scale > 1, negative=other)
    law = TokenLaw(temperature=0.0, guidance_scale=scale)
    got = AutoregressiveSampler()(image_model, condition, law=law, batch_size=4)
    assert torch.equal(image_model.output(condition, got.tokens), want)
    assert len(got.tokens.unique()) > 4


def test_pixels_are_those_of_the_model():
    image_model, condition = plan(INPUTS, guided=False)
    tokens = torch.randint(0, 24, (4, 15))
    ids = image_model.output(condition, tokens)
    got = Emu3ImageModel.pixels(MODEL, ids, (HEIGHT, WIDTH))
    want = MODEL.decode_image_tokens(image_tokens=ids[:, 7:], height=HEIGHT, width=WIDTH)
    assert torch.equal(got, want.clamp(-1, 1))
    assert torch.equal(got, MODEL.model.vqmodel.decode(tokens.view(4, HEIGHT, WIDTH)).clamp(-1, 1))


@pytest.mark.parametrize("sizes", [None, [], (3,), (3.0, 5.0), "3*5", [[3, 5, 1]]])
def test_sizes_that_are_none_are_refused(sizes):
    prompt = Prompt(INPUTS["input_ids"], INPUTS["attention_mask"])
    refuses(ValueError, "height", Emu3ImageModel.plan, MODEL, prompt, guided=False, image_sizes=sizes)


def test_a_vocabulary_without_the_closing_tokens_is_refused():
    model = emu3()
    del model.config.vocabulary_map["<|extra_201|>"]
    refuses(ValueError, "lacks <|extra_201|>", Emu3ImageModel, model, 2, 2)
