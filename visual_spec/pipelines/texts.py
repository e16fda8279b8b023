"""Pipelines that draw from texts: prompts and negative prompts, or features in place of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.tokenization_utils_base import LARGE_INTEGER

from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.steps import Generators, Laws, check_each

if TYPE_CHECKING:
    from transformers import BatchEncoding


@dataclass
class Texts:
    """The texts of a call, checked; its length is the number of prompts.

    Args:
        prompt: one string or a list; None beside `prompt_embeds`.
        prompt_embeds, prompt_attention_mask: features [prompts, words, channels] in place of prompts, and where there
            are words; no mask: everywhere.
        negative_prompt: what guidance leads away from: one string for all prompts, or a list of one each; None: from no
            text.
        negative_prompt_embeds, negative_prompt_attention_mask: the same as features, [prompts or 1, words, channels].

    Attributes:
        prompts, negatives: the texts as lists; empty where features are given.
        num_negatives: negative prompts: none, one for all prompts, or one for each.

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
            which = "neither" if self.prompt is None else "both"
            raise ValueError(f"{which} of prompt and prompt_embeds given; pass exactly one of them.")
        if self.negative_prompt is not None and self.negative_prompt_embeds is not None:
            raise ValueError("both of negative_prompt and negative_prompt_embeds given; pass one of them.")
        self.prompts = _strings("prompt", self.prompt)
        self.negatives = _strings("negative_prompt", self.negative_prompt)
        _check_features("prompt", self.prompt_embeds, self.prompt_attention_mask)
        _check_features("negative_prompt", self.negative_prompt_embeds, self.negative_prompt_attention_mask)
        embeds = self.negative_prompt_embeds
        self.num_negatives = len(self.negatives if embeds is None else embeds)
        check_each(self.num_negatives or 1, "negative prompts", len(self))

    def __len__(self) -> int:
        return len(self.prompts if self.prompt_embeds is None else self.prompt_embeds)

    def check_guided(self, law: Laws) -> None:
        """Refuse a negative prompt that guidance would not read; `law` may be a list, one for each scale.

        Raises:
            ValueError: says which guidance scale there is.
        """
        laws = law if isinstance(law, list) else [law]
        if self.num_negatives and not any(one.guided for one in laws):
            raise ValueError(
                f"negative_prompt given, but guidance_scale={laws[0].guidance_scale} runs no row that it could "
                "replace; pass a guidance_scale above 1, or no negative_prompt."
            )


def as_condition(
    prompt_embeds: Tensor,
    prompt_attention_mask: Tensor,
    negative_prompt_embeds: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
) -> TextCondition:
    """What `encode_prompt` returns, as models read it."""
    condition = TextCondition(prompt_embeds, prompt_attention_mask)
    if negative_prompt_embeds is not None and negative_prompt_attention_mask is not None:
        condition.negative = TextCondition(negative_prompt_embeds, negative_prompt_attention_mask)
    return condition


class ReadsText(VisualPipeline):
    """What pipelines share that draw from texts, whatever they draw."""

    transformer: Any
    text_encoder: Any

    _unseen = "the picture will not show it"  # of a word that the text encoder does not know
    _of_classes = "ClassImagePipeline"  # what takes a transformer of classes

    def _check_parts(self) -> None:
        super()._check_parts()
        if self.transformer is not None and self.transformer.config.get("num_classes") is not None:
            raise ValueError(f"the transformer draws from class labels; use {self._of_classes}.")

    def check_inputs(
        self, source: Any, each: int, law: Laws, generator: Generators, output_type: str
    ) -> None:
        super().check_inputs(source, each, law, generator, output_type)
        source.check_guided(law)
        self._check_words(source.prompts + source.negatives)

    def _check_words(self, texts: list[str]) -> None:
        check_words(self.text_encoder, None, texts)

    @property
    def _feature_dtype(self) -> torch.dtype | None:
        """In which the model reads features; None: as the encoder computes them."""
        return (self.text_encoder if self.transformer is None else self.transformer).dtype

    def _encode(self, texts: list[str]) -> TextCondition:
        if unknown := self.text_encoder.unknown_words(texts):
            named = ", ".join(map(repr, unknown))
            warnings.warn(f"the text encoder does not know {named}; {self._unseen}.", stacklevel=3)
        return self.text_encoder(texts)

    def encode_prompt(
        self, prompt: str | list[str] | Texts | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Features that a call takes in place of prompts, each repeated for its samples.

        Words the text encoder was not trained on are named in a warning, and stand for nothing in the sample. So is the
        end of a prompt that is longer than the encoder reads.

        Args:
            prompt, kwargs: as for a call: prompts and negative prompts, or features in place of them, or the `Texts`
                of both; and how many samples of each there are (`num_images_per_prompt` of pictures).

        Returns:
            prompt_embeds [samples, T, C], prompt_attention_mask [samples, T], negative_prompt_embeds and
            negative_prompt_attention_mask of as many rows, the last two None without a negative prompt. All lie on the
            pipeline's device.
        """
        each = kwargs.pop(self._each, 1)
        texts = prompt if isinstance(prompt, Texts) else Texts(prompt, **kwargs)
        prompt_embeds, prompt_attention_mask = texts.prompt_embeds, texts.prompt_attention_mask
        negative_prompt_embeds = texts.negative_prompt_embeds
        negative_prompt_attention_mask = texts.negative_prompt_attention_mask
        if words := texts.prompts + texts.negatives:  # all are encoded together, and so padded to one length
            encoded, own = self._encode(words), len(texts.prompts)
            if own:
                prompt_embeds, prompt_attention_mask = encoded.features[:own], encoded.mask[:own]
            if texts.negatives:
                negative_prompt_embeds = encoded.features[own:]
                negative_prompt_attention_mask = encoded.mask[own:]
        prompt_embeds, prompt_attention_mask = self._rows(prompt_embeds, prompt_attention_mask, each)
        if negative_prompt_embeds is not None:
            times = each * len(texts) // len(negative_prompt_embeds)
            negative_prompt_embeds, negative_prompt_attention_mask = self._rows(
                negative_prompt_embeds, negative_prompt_attention_mask, times
            )
        return prompt_embeds, prompt_attention_mask, negative_prompt_embeds, negative_prompt_attention_mask

    def _rows(self, embeds: Any, mask: Tensor | None, times: int) -> tuple[Tensor, Tensor]:
        """Features and their mask on the device, each row `times` times; without a mask, words are everywhere."""
        device = self._execution_device
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool) if mask is None else mask
        embeds, mask = embeds.to(device, self._feature_dtype), mask.to(device, torch.bool)
        return embeds.repeat_interleave(times, 0), mask.repeat_interleave(times, 0)

    def make_condition(self, prompt: str | list[str] | None = None, **kwargs: Any) -> TextCondition:
        """What the transformer reads of prompts, as samplers take it; arguments as of `encode_prompt`.

        Returns:
            TextCondition with features [samples, T, C]; `negative` of it where there is a negative prompt.
        """
        return as_condition(*self.encode_prompt(prompt, **kwargs))


def check_words(text_encoder: Any, tokenizer: Any, texts: list[str]) -> None:
    """Refuse texts without a word, and an encoder, or the tokenizer of one of transformers, that is missing.

    Raises:
        ValueError: names the text, or what to pass in place of encoder or tokenizer.
    """
    if not texts:
        return
    if text_encoder is None:
        raise ValueError(
            "this pipeline was loaded without a text encoder; pass prompt_embeds, or set pipe.text_encoder."
        )
    if hasattr(text_encoder, "check_prompts"):  # our own
        return text_encoder.check_prompts(texts)
    if tokenizer is None:
        raise ValueError("the text encoder has no tokenizer; pass prompt_embeds, or set pipe.tokenizer.")
    for text in texts:
        if not text.strip():
            raise ValueError(f"prompt {text!r} has no words; give at least one.")


def tokenized(tokenizer: Any, texts: list[str]) -> BatchEncoding:
    """Token ids and their mask, [texts, T] each, of a tokenizer of transformers, with a warning about what is cut off.

    Tokens beyond the tokenizer's `model_max_length` are cut off; its own end token stays.
    """
    room = tokenizer.model_max_length - tokenizer.num_special_tokens_to_add()
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if cut := ids[room:]:
            from visual_spec.models.text.caption_encoder import warn_cut

            warn_cut(text, tokenizer.decode(cut), room, "tokens")
    has_limit = room < LARGE_INTEGER
    return tokenizer(texts, padding=True, truncation=has_limit, return_tensors="pt")


def _strings(name: str, texts: object) -> list[str]:
    """One text or several as a list; none of None."""
    if texts is None:
        return []
    listed = [texts] if isinstance(texts, str) else texts
    if not isinstance(listed, (list, tuple)) or not all(isinstance(text, str) for text in listed):
        raise TypeError(f"{name}={texts!r}; pass a string or a list of strings.")
    if not listed:
        raise ValueError(f"{name} is an empty list; pass at least one prompt.")
    for text in listed:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding, or half of a "\\ud83d" pair
            raise ValueError(
                f"{name}={text!r} holds what is no letter in Unicode ({error.reason}); write it anew."
            ) from error
    return list(listed)


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
