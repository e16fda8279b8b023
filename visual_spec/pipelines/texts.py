"""Pipelines that draw from texts: prompts and negative prompts, or features in place of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.tokenization_utils_base import LARGE_INTEGER

from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.base import VisualPipeline
from visual_spec.pipelines.steps import Asked, check_each, listed


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
            which = "neither" if self.prompt is None else "both"
            raise ValueError(f"{which} of prompt and prompt_embeds given; pass exactly one of them.")
        if self.negative_prompt is not None and self.negative_prompt_embeds is not None:
            raise ValueError("both of negative_prompt and negative_prompt_embeds given; pass one of them.")
        _check_strings("prompt", self.prompt)
        _check_strings("negative_prompt", self.negative_prompt)
        _check_features("prompt", self.prompt_embeds, self.prompt_attention_mask)
        _check_features("negative_prompt", self.negative_prompt_embeds, self.negative_prompt_attention_mask)
        check_each(self.num_negatives or 1, "negative prompts", self.count)

    @property
    def prompts(self) -> list[str]:
        """The prompts; none where features are given."""
        return listed(self.prompt)

    @property
    def negatives(self) -> list[str]:
        """The negative prompts, one for all prompts or one for each; none where features are given."""
        return listed(self.negative_prompt)

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
        """What the transformer reads: features on the device, each row `times` times.

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
        whole = part(0, own, self.prompt_embeds, self.prompt_attention_mask, times)
        if others:
            repeats = times * self.count // others
            whole.negative = part(
                own, own + others, self.negative_prompt_embeds, self.negative_prompt_attention_mask, repeats
            )
        return whole


class ReadsText(VisualPipeline):
    """What pipelines share that draw from texts, whatever they draw."""

    transformer: Any
    text_encoder: Any

    _each = "num_images_per_prompt"
    _unseen = "the picture will not show it"  # of a word that the text encoder does not know
    _of_classes = "ClassImagePipeline"  # what takes a transformer of classes

    def _check_parts(self) -> None:
        super()._check_parts()
        if self.transformer is not None and self.transformer.config.get("num_classes") is not None:
            raise ValueError(f"the transformer draws from class labels; use {self._of_classes}.")

    def _asked(self, args: Mapping[str, Any]) -> Asked:
        law = self._law(args)
        texts = Texts(**{one.name: args[one.name] for one in fields(Texts) if one.name in args})
        laws = law if isinstance(law, list) else [law]
        texts.check_guided(any(one.guided for one in laws), laws[0].guidance_scale)
        return Asked(texts, texts.count, args[self._each], self._each, law)

    def _check_call(self, args: Mapping[str, Any], asked: Asked, *parts: str) -> None:
        super()._check_call(args, asked, *parts)
        self._check_words(asked.source)

    def _check_words(self, texts: Texts) -> None:
        check_words(self.text_encoder, None, texts.prompts + texts.negatives)

    def _condition(self, args: Mapping[str, Any], asked: Asked) -> Any:
        return self._features(asked.source, asked.each)

    def _features(self, texts: Texts, each: int) -> TextCondition:
        """What the transformer reads: the features of texts on its device, each text's `each` times."""
        reader = self.text_encoder if self.transformer is None else self.transformer
        return texts.condition(self._encode, each, self._execution_device, reader.dtype)

    def _encode(self, texts: list[str]) -> TextCondition:
        if unknown := self.text_encoder.unknown_words(texts):
            named = ", ".join(map(repr, unknown))
            warnings.warn(f"the text encoder does not know {named}; {self._unseen}.", stacklevel=3)
        return self.text_encoder(texts)

    def make_condition(self, prompt: str | list[str] | None = None, **kwargs: Any) -> TextCondition:
        """What the transformer reads of prompts, as samplers take it: their features, each repeated for its samples.

        Words the text encoder was not trained on are named in a warning, and stand for nothing in the sample. So is the
        end of a prompt that is longer than the encoder reads.

        Args:
            prompt, kwargs: as for a call: prompts and negative prompts, or features in place of them, and how many
                samples of each there are (`num_images_per_prompt` of pictures).

        Returns:
            TextCondition with features [samples, T, C] on the pipeline's device; `negative` of it, of as many rows,
            where there is a negative prompt.
        """
        each = kwargs.pop(self._each, 1)
        return self._features(Texts(prompt, **kwargs), each)

    def encode_prompt(
        self, prompt: str | list[str] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Features that a call takes in place of prompts; arguments and warnings as of `make_condition`.

        Returns:
            prompt_embeds [samples, T, C], prompt_attention_mask [samples, T], negative_prompt_embeds and
            negative_prompt_attention_mask, the last two None without a negative prompt.
        """
        encoded = self.make_condition(prompt, **kwargs)
        prompt_embeds, prompt_attention_mask, negative = encoded.features, encoded.mask, encoded.negative
        negative_prompt_embeds, negative_prompt_attention_mask = (
            (None, None) if negative is None else (negative.features, negative.mask)
        )
        return prompt_embeds, prompt_attention_mask, negative_prompt_embeds, negative_prompt_attention_mask


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


def tokenized(tokenizer: Any, texts: list[str]) -> Any:
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


def _check_strings(name: str, texts: Any) -> None:
    if texts is None:
        return
    if isinstance(texts, str):
        return _check_letters(name, texts)
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}={texts!r}; pass a string or a list of strings.")
    if not texts:
        raise ValueError(f"{name} is an empty list; pass at least one prompt.")
    for text in texts:
        _check_letters(name, text)


def _check_letters(name: str, text: str) -> None:
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # bytes of another encoding on the command line, or half of a "\\ud83d" pair
        raise ValueError(
            f"{name}={text!r} holds what is no letter in Unicode ({error.reason}); write it anew."
        ) from error


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
