"""GLM-Image's autoregressive stage against its own `generate`."""

from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.next_token.tiny_transformers import glm_image, prompts
from visual_spec.models.core.transformers_cache import Prompt
from visual_spec.models.next_token.glm_image import GlmImageStage
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

MODEL = glm_image()
GREEDY = TokenLaw(temperature=0.0)
INPUTS = prompts([6, 4, 7, 3], low=30, high=50, pad=50, last=26, first=31)
GRIDS = torch.tensor([[1, 3, 5], [1, 2, 3]])  # the large one, and the small one that is drawn first
TEXT: dict[str, Any] = dict(image_grid_thw=GRIDS.repeat(4, 1), images_per_sample=torch.tensor([2] * 4))


def draw(inputs: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
    """All stages, greedy."""
    prompt = Prompt(inputs["input_ids"], inputs["attention_mask"])
    stage, condition = GlmImageStage.plan(MODEL, prompt, guided=False, **more)
    while True:
        tokens = AutoregressiveSampler()(stage, condition, law=GREEDY, batch_size=len(prompt.ids)).tokens
        following = stage.next_stage(condition, tokens)
        if following is None:
            return stage.output(condition, tokens)
        stage, condition = following


def native(inputs: dict[str, torch.Tensor], count: int, **more: Any) -> torch.Tensor:
    """`generate`, allowed codes only, and the image end at the end."""
    start = inputs["input_ids"].shape[1]

    def allowed(_, ids):
        return [27] if len(ids) - start == count else list(range(24))

    return MODEL.generate(
        **inputs, max_new_tokens=count + 1, do_sample=False, prefix_allowed_tokens_fn=allowed, **more
    )


def test_greedy_tokens_are_those_of_generate():
    want = native(INPUTS, 21, **TEXT)
    assert torch.equal(draw(INPUTS, **TEXT), want)
    assert len(want[:, 7:].unique()) > 4


@pytest.mark.parametrize("per_sample", [True, False])
def test_greedy_tokens_of_one_sample_are_those_of_generate(per_sample):
    alone = {name: tensor[:1, 1:] for name, tensor in INPUTS.items()}
    more: dict[str, Any] = dict(image_grid_thw=GRIDS)
    if per_sample:
        more["images_per_sample"] = torch.tensor([2])
    assert torch.equal(draw(alone, **more), native(alone, 21, **more))


def test_greedy_tokens_after_pictures_are_those_of_generate():
    """Image to image: a picture of 2 x 4 tokens in the prompt, one grid to draw."""
    rows = [[50, 50, 31, 26, *[51] * 8, 27, 33, 26], [30, 34, 31, 26, *[51] * 8, 27, 35, 26]]
    ids = torch.tensor(rows)
    inputs = dict(input_ids=ids, attention_mask=(ids != 50).long())
    pixels = torch.randn(16, 3 * 8 * 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grids = torch.tensor([[1, 2, 4], [1, 3, 3]]).repeat(2, 1)
    more: dict[str, Any] = dict(
        pixel_values=pixels, image_grid_thw=grids, images_per_sample=torch.tensor([2, 2])
    )
    want = native(inputs, 9, **more)
    got = draw(inputs, **more)
    assert torch.equal(got[:, -10:], want[:, -10:])


def test_planning_leaves_the_model_as_it_was():
    model = glm_image()
    prompt = Prompt(INPUTS["input_ids"], INPUTS["attention_mask"])
    GlmImageStage.plan(model, prompt, guided=False, **TEXT)
    assert model.model._cached_decode_position_ids is None
    assert model.model._prefill_len is None and model.model.rope_deltas is None


def test_what_does_not_fit_is_refused():
    prompt = Prompt(INPUTS["input_ids"], INPUTS["attention_mask"])
    refuses(ValueError, "guidance_scale", GlmImageStage.plan, MODEL, prompt, guided=True, **TEXT)
    refuses(ValueError, "image_grid_thw", GlmImageStage.plan, MODEL, prompt, guided=False)
    mixed = TEXT | dict(image_grid_thw=torch.cat([GRIDS.repeat(3, 1), GRIDS.flip(0)]))
    with pytest.raises(ValueError, match=r"\[\(\(2, 3\), \(3, 5\)\), \(\(3, 5\), \(2, 3\)\)\]"):
        GlmImageStage.plan(MODEL, prompt, guided=False, **mixed)
    refuses(TypeError, r"diffusers\.GlmImagePipeline", GlmImageStage.pixels, MODEL, prompt.ids)
