"""What a text pipeline is told: prompts and negative prompts, or features in place of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.tokenization_utils_base import LARGE_INTEGER

from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.text.cutting import warn_cut


@dataclass(frozen=True)
class Texts:
    """The texts of a call, checked.

    Args:
        prompt: one string or a list; None beside `prompt_embeds`.
        prompt_embeds, prompt_attention_mask: features [prompts, words, channels] in place of prompts, and where there
            are words; no mask: everywhere.
        negative_prompt: what guidance leads away from: one string for all prompts, or a list of one each; None: from no
            text.
        negative_prompt_embeds, negative_prompt_attention_mask: the same as features, [prompts or 1, words, channels].

    Raises:
        TypeError, ValueError: names what was given, and what to pass.
    """

    prompt: str | Sequence[str] | None
    prompt_embeds: Tensor | None = None
    prompt_attention_mask: Tensor | None = None
    negative_prompt: str | Sequence[str] | None = None
    negative_prompt_embeds: Tensor | None = None
    negative_prompt_attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_embeds is None):
            given = "neither" if self.prompt is None else "both"
            raise ValueError(f"{given} of prompt and prompt_embeds given; pass exactly one of them.")
        if self.negative_prompt is not None and self.negative_prompt_embeds is not None:
            raise ValueError("both of negative_prompt and negative_prompt_embeds given; pass one of them.")
        _check_strings("prompt", self.prompt)
        _check_strings("negative_prompt", self.negative_prompt)
        _check_features("prompt", self.prompt_embeds, self.prompt_attention_mask)
        _check_features("negative_prompt", self.negative_prompt_embeds, self.negative_prompt_attention_mask)
        if self.num_negatives not in (0, 1, self.count):
            raise ValueError(
                f"{self.num_negatives} negative prompts for {self.count} prompts; pass one for all of them, or one for "
                "each."
            )

    @property
    def prompts(self) -> list[str]:
        """The prompts; none where features are given."""
        return _listed(self.prompt)

    @property
    def negatives(self) -> list[str]:
        """The negative prompts, one for all prompts or one for each; none where features are given."""
        return _listed(self.negative_prompt)

    @property
    def count(self) -> int:
        """Number of prompts."""
        return len(self.prompts) if self.prompt_embeds is None else len(self.prompt_embeds)

    @property
    def num_negatives(self) -> int:
        """Number of negative prompts: none, one for all prompts, or one for each."""
        return (
            len(self.negatives) if self.negative_prompt_embeds is None else len(self.negative_prompt_embeds)
        )

    def check_guided(self, guided: bool, scale: Any) -> None:
        """Refuse a negative prompt that guidance would not read.

        Raises:
            ValueError: says which guidance scale there is.
        """
        if self.num_negatives and not guided:
            raise ValueError(
                f"negative_prompt given, but guidance_scale={scale} runs no row that it could replace; pass a "
                "guidance_scale above 1, or no negative_prompt."
            )

    def condition(
        self,
        encode: Callable[[list[str]], TextCondition],
        times: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> TextCondition:
        """What the transformer is told: features on the device, each row `times` times.

        Args:
            encode: the text encoder. All texts are encoded together, and so padded to one length.
            dtype: of the features; None: as the encoder computes them.
        """
        texts = self.prompts + self.negatives
        encoded = encode(texts) if texts else None

        def part(
            first: int, stop: int, embeds: Tensor | None, mask: Tensor | None, repeats: int
        ) -> TextCondition:
            if embeds is None:
                assert encoded is not None
                features, seen = encoded.features[first:stop], encoded.mask[first:stop]
            else:
                features = embeds
                seen = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask
            return TextCondition(
                features.to(device, dtype).repeat_interleave(repeats, 0),
                seen.to(device, torch.bool).repeat_interleave(repeats, 0),
            )

        own, others = len(self.prompts), self.num_negatives
        told = part(0, own, self.prompt_embeds, self.prompt_attention_mask, times)
        if others:
            repeats = times * self.count // others
            told.negative = part(
                own, own + others, self.negative_prompt_embeds, self.negative_prompt_attention_mask, repeats
            )
        return told


def warn_unknown(encoder: Any, texts: list[str], effect: str) -> None:
    """Name the words that a text encoder was not trained on; `effect` says what that means."""
    unknown = encoder.unknown_words(texts)
    if unknown:
        warnings.warn(
            f"the text encoder does not know {', '.join(map(repr, unknown))}; {effect}.", stacklevel=4
        )


def tokenized(tokenizer: Any, texts: list[str]) -> Any:
    """Token ids and their mask, [texts, T] each, of a tokenizer of transformers, with a warning about what is cut off.

    Tokens beyond the tokenizer's `model_max_length` are cut off; its own end token stays.
    """
    room = tokenizer.model_max_length - tokenizer.num_special_tokens_to_add()
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if cut := ids[room:]:
            warn_cut(text, tokenizer.decode(cut), room, "tokens")
    has_limit = room < LARGE_INTEGER
    return tokenizer(texts, padding=True, truncation=has_limit, return_tensors="pt")


def _listed(texts: str | Sequence[str] | None) -> list[str]:
    return [] if texts is None else [texts] if isinstance(texts, str) else list(texts)


def _check_strings(name: str, texts: Any) -> None:
    if texts is None or isinstance(texts, str):
        return
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}={texts!r}; pass a string or a list of strings.")
    if not texts:
        raise ValueError(f"{name} is an empty list; pass at least one prompt.")


def _check_features(name: str, embeds: Tensor | None, mask: Tensor | None) -> None:
    if embeds is None:
        return
    if embeds.ndim != 3:
        raise ValueError(f"{name}_embeds of shape {tuple(embeds.shape)}; pass [prompts, words, channels].")
    if mask is not None and mask.shape != embeds.shape[:2]:
        raise ValueError(
            f"{name}_attention_mask of shape {tuple(mask.shape)} beside {name}_embeds of shape {tuple(embeds.shape)}; "
            f"pass a mask of shape {tuple(embeds.shape[:2])}."
        )
