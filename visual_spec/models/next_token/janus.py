"""Janus and Janus-Pro (Wu et al. 2024; Chen et al. 2025) as next-token models, around transformers' own class.

An image token has its own embedding, aligner and head, so text and image vocabularies share only the decoder. There are
no row ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder

if TYPE_CHECKING:
    from transformers import JanusForConditionalGeneration


class JanusImageModel(CachedDecoder):
    """The image half of a `JanusForConditionalGeneration`.

    Args:
        model: the transformers model; it is not changed.

    Raises:
        ValueError: the number of image tokens is not a square.
    """

    family = "Janus"
    returns_prompt = False
    guidance_scale = 5.0  # the default of `generate`

    @staticmethod
    def asks_for_pictures(asked: Mapping[str, object]) -> bool:
        return asked.get("generation_mode", "text") == "image"

    def __init__(self, model: Any) -> None:
        self.model = model
        side = round(model.config.vision_config.num_image_tokens**0.5)
        if side * side != model.config.vision_config.num_image_tokens:
            raise ValueError(
                f"vision_config.num_image_tokens={model.config.vision_config.num_image_tokens}; "
                "Janus draws square pictures, pass a square number."
            )
        codes = model.config.vq_config.num_embeddings
        super().__init__(
            decoder=model.model.language_model,
            table=model.get_input_embeddings(),
            head=model.model.generation_head,
            image_ids=list(range(codes)),
            grid=TokenGrid(side, side),
        )
        self.plain_draws = (codes, torch.arange(codes), model.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def score(self, features: Tensor) -> Tensor:
        return self.head(features)

    @classmethod
    def plan(
        cls, model: JanusForConditionalGeneration, prompt: Prompt, *, guided: bool
    ) -> tuple[JanusImageModel, ImagePrompt]:
        """Return the image model, and its condition.

        The unconditional prompt is `generate`'s: every token except the first and the image start becomes the padding
        id, which is attended to.

        Args:
            prompt: the processor's output with `generation_mode="image"`; ends with the image start.

        Raises:
            ValueError: guided, but the generation config does not define those ids.
        """
        unconditional = None
        if guided:
            config = model.generation_config
            extra = getattr(config, "generation_kwargs", None) or {}
            ids = {"bos": config.bos_token_id, "boi": extra.get("boi_token_id"), "pad": config.pad_token_id}
            missing = [name for name, value in ids.items() if value is None]
            if missing:
                raise ValueError(
                    f"guidance needs the ids of {', '.join(missing)}; set model.generation_config.bos_token_id, "
                    ".pad_token_id and .generation_kwargs = {'boi_token_id': ...}, as the checkpoints do."
                )
            kept = (prompt.ids == ids["bos"]) | (prompt.ids == ids["boi"])
            unconditional = Prompt(prompt.ids.masked_fill(~kept, ids["pad"]), prompt.mask)
        return cls(model), ImagePrompt(prompt, unconditional)

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """Return what `generate(generation_mode="image")` returns: the image tokens, long [B, height * width]."""
        return tokens

    @staticmethod
    @torch.no_grad()
    def pixels(model: JanusForConditionalGeneration, ids: Tensor) -> Tensor:
        """Return pictures [B, 3, H, W] in [-1, 1] of image tokens [B, height * width]."""
        return rearrange(model.decode_image_tokens(ids), "b h w c -> b c h w").clamp(-1, 1)
