"""The autoregressive stage of GLM-Image (Z.ai 2026) as next-token models, around transformers' own class.

It draws a small picture, then the large one: two grids and so two stages, each a `NextTokenModel` of its own shape. The
tokens of the first stage are part of the prompt of the second. Positions have three axes: all tokens of a grid share
the first one, rows and columns count on the others. The head scores image tokens only. There is no guidance and no
decoder here: the diffusion stage (`diffusers.GlmImagePipeline`) makes the pixels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt, filled
from visual_spec.models.next_token.cached_decoder import CachedDecoder


class GlmImageStage(CachedDecoder):
    """One grid of a `GlmImageForConditionalGeneration`.

    Only codes are drawn. `generate` also allows later ids (the image end among them), which no decoder reads.

    Args:
        model: the transformers model; it is not changed.
        height, width: image tokens of the grid.
        following: (height, width) of the grids to draw afterwards.
    """

    family = "GLM-Image"

    def __init__(
        self, model: Any, height: int, width: int, following: tuple[tuple[int, int], ...] = ()
    ) -> None:
        self.model = model
        self.following = following
        super().__init__(
            decoder=model.model.language_model,
            table=model.model.language_model.embed_tokens,
            head=model.lm_head,
            image_ids=list(range(model.config.vq_config.num_embeddings)),
            grid=TokenGrid(height, width),
        )
        self.new_tokens = self.length + sum(height * width for height, width in following)

    def positions(self, start: Tensor, offsets: Tensor) -> Tensor:
        first = start[:, None].expand_as(offsets)
        return torch.stack([first, first + offsets // self.grid.width, first + offsets % self.grid.width])

    @classmethod
    def plan(
        cls,
        model: Any,
        prompt: Prompt,
        *,
        guided: bool,
        image_grid_thw: Tensor | None = None,
        images_per_sample: Tensor | None = None,
        pixel_values: Tensor | None = None,
    ) -> tuple[GlmImageStage, ImagePrompt]:
        """Return the first stage, and its condition.

        Args:
            prompt: the processor's output.
            image_grid_thw: long [images, 3], one (1, height, width) for every picture of the prompt or to draw.
                Pictures to draw are last in each sample, and are drawn from the last one on.
            images_per_sample: long [B], how many of them each sample has; None gives all of them to every sample.
            pixel_values: the pictures of the prompt.

        Raises:
            ValueError: guidance is asked for, there are no grids, or the grids differ between samples.
        """
        if guided:
            raise ValueError("GLM-Image's autoregressive stage has no guidance; leave guidance_scale out.")
        if image_grid_thw is None:
            raise ValueError("image_grid_thw is missing; pass what the processor returns beside input_ids.")
        inner = model.model
        if pixel_values is not None:
            drawn = model.get_image_features(pixel_values, image_grid_thw, images_per_sample).pooler_output
            ids = filled(prompt.ids, inner.get_image_tokens(drawn).flatten(), model.config.image_token_id)
            prompt = Prompt(ids, prompt.mask)
        grids = [image_grid_thw] * len(prompt.ids)
        if images_per_sample is not None:
            grids = list(image_grid_thw.split(images_per_sample.tolist()))
        shapes = set()
        for ids, mask, own in zip(prompt.ids, prompt.mask, grids, strict=True):
            pictures = int(((ids == model.config.image_end_token_id) & mask).sum())  # of the prompt
            shapes.add(tuple((h, w) for _, h, w in reversed(own[pictures:].tolist())))
        if len(shapes) > 1 or () in shapes:
            raise ValueError(
                f"the grids to draw are {sorted(shapes)}; every sample of a batch needs the same ones, at least one."
            )
        (first, *others) = shapes.pop()
        # The model keeps what this call computes; restore its previous value.
        before = inner._cached_decode_position_ids, inner._prefill_len
        positions, _ = inner.get_rope_index(prompt.ids, image_grid_thw, images_per_sample, prompt.mask.long())
        start = inner._cached_decode_position_ids[:, 0, 0]
        inner._cached_decode_position_ids, inner._prefill_len = before
        prompt = Prompt(prompt.ids, prompt.mask, positions, start)
        return cls(model, *first, following=tuple(others)), ImagePrompt(prompt)

    def next_stage(self, condition: ImagePrompt, tokens: Tensor) -> tuple[GlmImageStage, ImagePrompt] | None:
        if not self.following:
            return None
        prompt = condition.prompt
        positions, start = (tensor.to(tokens.device) for tensor in prompt.where)
        drawn = self.positions(start, torch.arange(self.length, device=tokens.device).expand_as(tokens))
        longer = Prompt(
            ids=torch.cat([prompt.ids.to(tokens.device), tokens], 1),
            mask=torch.cat([prompt.mask.to(tokens.device), torch.ones_like(tokens, dtype=torch.bool)], 1),
            positions=torch.cat([positions, drawn], -1),
            start=start + max(self.grid.height, self.grid.width),
        )
        (height, width), *others = self.following
        return GlmImageStage(self.model, height, width, tuple(others)), ImagePrompt(longer)

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """Return what `generate` returns: the prompt, the grids in the order they were drawn, the image end."""
        ids = torch.cat([condition.prompt.ids.to(tokens.device), tokens], 1)
        return torch.cat([ids, ids.new_full((len(ids), 1), self.model.config.image_end_token_id)], 1)

    @staticmethod
    def pixels(model: object, ids: Tensor) -> Tensor:
        """Raise TypeError: this stage makes tokens for a diffusion stage, not pixels."""
        raise TypeError(
            "GLM-Image's tokens are no pixels yet: diffusers.GlmImagePipeline decodes them. Accelerate that pipeline "
            "(visual_spec.accelerate(pipe, sampler)), or hand it the tokens."
        )
