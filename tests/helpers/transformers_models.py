"""Inputs of image models of transformers, and how tests draw from them."""

from typing import Any

import torch

from tests.helpers.tiny import seeded
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_transformers import prompts
from visual_spec.pipelines.accelerate import accelerate, restore

GRIDS = torch.tensor([[1, 3, 5], [1, 2, 3]])
INPUTS: dict[str, dict[str, Any]] = {
    "janus": prompts([6, 4, 7], low=6, high=48, pad=0, last=3, first=1),
    "chameleon": prompts([6, 4, 7], low=68, high=80, pad=1, last=70, first=0),
    "lumina": prompts([6, 4, 7], low=68, high=80, pad=1, last=70, first=0)
    | dict(layout="lumina-mgpt", image_sizes=(4, 6)),
    "emu3": prompts([6, 4, 7], low=50, high=62, pad=1, last=62, first=0) | dict(image_sizes=[[3, 5]] * 3),
    "glm": prompts([6, 4, 7], low=30, high=50, pad=50, last=26, first=31)
    | dict(image_grid_thw=GRIDS.repeat(3, 1), images_per_sample=torch.tensor([2] * 3)),
}
SETTINGS: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=10, top_p=0.95)
GUIDED = {"janus": 3.0, "chameleon": 3.0, "lumina": 3.0, "emu3": 3.0, "glm": None}

MAKE = {
    "janus": tiny.janus,
    "chameleon": tiny.chameleon,
    "lumina": tiny.chameleon,
    "emu3": tiny.emu3,
    "glm": tiny.glm_image,
}
MODELS = {name: make() for name, make in MAKE.items()}


def draw(model: Any, name: str, sampler: Any, *, guided: bool = True, **more: Any) -> torch.Tensor:
    settings = SETTINGS | (dict(guidance_scale=GUIDED[name]) if guided and GUIDED[name] else {})
    if name == "janus" and not guided:
        settings["guidance_scale"] = 1.0
    accelerate(model, sampler)
    try:
        return model.generate_images(**INPUTS[name], **settings, generator=seeded(1, 2, 3), **more)
    finally:
        restore(model)
