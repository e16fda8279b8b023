"""Image models of transformers, each with a condition of four prompts of different lengths."""

import functools
from typing import Any

import torch

from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_transformers import prompts
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.models.next_token.chameleon import ChameleonImageModel
from visual_spec.models.next_token.emu3 import Emu3ImageModel
from visual_spec.models.next_token.glm_image import GlmImageStage
from visual_spec.models.next_token.janus import JanusImageModel

LENGTHS = [6, 4, 7, 3]
GRIDS = torch.tensor([[1, 3, 4], [1, 2, 3]])


@functools.cache
def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[CachedDecoder, ImagePrompt]:
    """The image model and four prompts of different lengths, unconditional ones too where the family has them."""
    if name == "janus":
        inputs = prompts(LENGTHS, low=6, high=48, pad=0, last=3, first=1)
        return JanusImageModel.plan(tiny.janus(dtype), _prompt(inputs), guided=True)
    if name in ("chameleon", "lumina"):
        inputs = prompts(LENGTHS, low=68, high=80, pad=1, last=70, first=0)
        size: dict[str, Any] = dict(layout="lumina-mgpt", image_sizes=(4, 4)) if name == "lumina" else {}
        return ChameleonImageModel.plan(tiny.chameleon(dtype), _prompt(inputs), guided=True, **size)
    if name == "emu3":
        inputs = prompts(LENGTHS, low=50, high=62, pad=1, last=62, first=0)
        return Emu3ImageModel.plan(tiny.emu3(dtype), _prompt(inputs), guided=True, image_sizes=(5, 3))
    inputs = prompts(LENGTHS, low=30, high=50, pad=50, last=26, first=31)
    grids = dict(image_grid_thw=GRIDS.repeat(4, 1), images_per_sample=torch.tensor([2] * 4))
    stage = GlmImageStage.plan(tiny.glm_image(dtype), _prompt(inputs), guided=False, **grids)
    if name == "glm large":
        small = torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(7))
        following = stage[0].next_stage(stage[1], small)
        assert following is not None
        return following
    return stage


def _prompt(inputs: dict[str, torch.Tensor]) -> Prompt:
    return Prompt(inputs["input_ids"], inputs["attention_mask"])


def rows_of(condition: ImagePrompt, rows: list[int]) -> ImagePrompt:
    """Some rows of a condition; a single one also without its padding."""

    def part(prompt: Prompt | None) -> Prompt | None:
        if prompt is None:
            return None
        length = int(prompt.mask[rows].sum(1).max())
        positions, start = prompt.where
        batch = positions.ndim - 2
        kept = positions.index_select(batch, torch.tensor(rows))[..., -length:]
        return Prompt(prompt.ids[rows, -length:], prompt.mask[rows, -length:], kept, start[rows])

    first = part(condition.prompt)
    assert first is not None
    return ImagePrompt(first, part(condition.unconditional))


def text(model: CachedDecoder, batch: int = 4, seed: int = 0) -> torch.Tensor:
    size = (batch, model.grid.num_tokens)
    return torch.randint(0, model.vocab_size, size, generator=torch.Generator().manual_seed(seed))
