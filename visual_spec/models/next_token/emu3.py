"""Emu3 (Wang et al. 2024) as a next-token model, around transformers' own class.

Image tokens are ids of the text vocabulary. Every row of the picture ends with `<|extra_200|>`, and the picture with
end of frame, end of image and end of text. All of these are forced, and none of them is a slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt, one_size
from visual_spec.models.next_token.cached_decoder import CachedDecoder
from visual_spec.models.next_token.emu3_constraint import AllowedTokens, Emu3Constraint

if TYPE_CHECKING:
    from transformers import Emu3ForConditionalGeneration

_END_OF_FRAME, _END_OF_IMAGE = "<|extra_201|>", "<|image end|>"


class Emu3ImageModel(CachedDecoder):
    """The image half of an `Emu3ForConditionalGeneration`.

    Args:
        model: the transformers model; it is not changed.
        height, width: image tokens of the picture.

    Raises:
        ValueError: the vocabulary map lacks the tokens that close a picture.
    """

    family = "Emu3"

    @staticmethod
    def asks_for_pictures(asked: Mapping[str, object]) -> bool:
        return asked.get("image_sizes") is not None and asked.get("pixel_values") is None

    @staticmethod
    def lays_out(asked: Mapping[str, object]) -> bool:
        return asked.get("prefix_allowed_tokens_fn") is not None

    def __init__(self, model: Emu3ForConditionalGeneration, height: int, width: int) -> None:
        self.model = model
        super().__init__(
            decoder=model.model.text_model,
            table=model.get_input_embeddings(),
            head=model.lm_head,
            image_ids=model.model.vocabulary_mapping.image_tokens,
            grid=TokenGrid(height, width),
            row_end=model.model.vocabulary_mapping.eol_token_id,
        )
        self.closing = _closing(model)

    @staticmethod
    def constraint(
        model: Emu3ForConditionalGeneration, allowed: AllowedTokens, prompts: Tensor, most: int
    ) -> Emu3Constraint:
        """Read a `prefix_allowed_tokens_fn` of `generate` as the layout of a picture.

        Raises:
            ValueError: as in the class, and `NoLayoutError` as in `Emu3Constraint`.
        """
        mapping = model.model.vocabulary_mapping
        return Emu3Constraint(
            allowed,
            prompts,
            most=most,
            image_ids=mapping.image_tokens,
            row_end=mapping.eol_token_id,
            closing=_closing(model),
        )

    @classmethod
    def plan(
        cls,
        model: Emu3ForConditionalGeneration,
        prompt: Prompt,
        *,
        guided: bool,
        image_sizes: object = None,
        negative: Prompt | None = None,
        pixel_values: Tensor | None = None,
    ) -> tuple[Emu3ImageModel, ImagePrompt]:
        """Return the image model, and its condition.

        Args:
            prompt: the processor's output with `return_for_image_generation=True`; ends where the picture starts.
            image_sizes: (height, width) in tokens, [B, 2] or one pair, as from the processor.
            negative: the unconditional prompt; None is the last token of the prompt, as in `generate`.

        Raises:
            ValueError: there is no size, several sizes, or pixel values (Emu3 draws from text).
        """
        if pixel_values is not None:
            raise ValueError("Emu3 draws from text; leave pixel_values out.")
        height, width = one_size(image_sizes)
        if negative is None and guided:
            negative = Prompt(prompt.ids[:, -1:], prompt.mask[:, -1:])
        return cls(model, height, width), ImagePrompt(prompt, negative)

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """Return what `generate` returns: the prompt, the picture with row ends, end of frame, of image and of text."""
        ids = torch.cat([condition.prompt.ids.to(tokens.device), self.sequence(tokens)], 1)
        return torch.cat([ids, ids.new_tensor(self.closing).expand(len(ids), -1)], 1)

    @staticmethod
    @torch.no_grad()
    def pixels(model: Emu3ForConditionalGeneration, ids: Tensor, image_sizes: object = None) -> Tensor:
        """Return pictures [B, 3, H, W] in [-1, 1] from the result of `output`; `image_sizes` as in `plan`."""
        height, width = one_size(image_sizes)
        picture = ids[:, -(height * (width + 1) + 3) :]
        return model.decode_image_tokens(image_tokens=picture, height=height, width=width).clamp(-1, 1)


def _closing(model: Any) -> list[int]:
    """The ids that close a picture: end of frame, of image and of text."""
    names = model.config.vocabulary_map
    missing = [name for name in (_END_OF_FRAME, _END_OF_IMAGE) if name not in names]
    if missing:
        raise ValueError(
            f"config.vocabulary_map lacks {' and '.join(missing)}, the tokens that close a picture."
        )
    last = model.generation_config.eos_token_id or model.config.text_config.eos_token_id
    return [names[_END_OF_FRAME], names[_END_OF_IMAGE], last[0] if isinstance(last, list) else last]
