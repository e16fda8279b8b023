"""Checks of what several pipelines are given: prompts, features in place of them, generators."""

from typing import Any

import torch
from torch import Tensor


def check_prompts(prompt: Any, embeds: Tensor | None, mask: Tensor | None) -> list[str]:
    """Refuse all but prompts, or features in place of them.

    Args:
        prompt: one string or a list; None beside `embeds`.
        embeds: features [prompts, words, channels].
        mask: true at words, [prompts, words]; None is all of them.

    Returns:
        The prompts; none with `embeds`.

    Raises:
        TypeError, ValueError: names what was given, and what to pass.
    """
    if (prompt is None) == (embeds is None):
        given = "neither" if prompt is None else "both"
        raise ValueError(f"{given} of prompt and prompt_embeds given; pass exactly one of them.")
    if embeds is None:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not all(isinstance(text, str) for text in prompts):
            raise TypeError(f"prompt={prompt!r}; pass a string or a list of strings.")
        if not prompts:
            raise ValueError("prompt is an empty list; pass at least one prompt.")
        return list(prompts)
    if embeds.ndim != 3:
        raise ValueError(f"prompt_embeds of shape {tuple(embeds.shape)}; pass [prompts, words, channels].")
    if mask is not None and mask.shape != embeds.shape[:2]:
        raise ValueError(
            f"prompt_attention_mask of shape {tuple(mask.shape)} beside prompt_embeds of shape {tuple(embeds.shape)}; "
            f"pass a mask of shape {tuple(embeds.shape[:2])}."
        )
    return []


def check_own_words(text_encoder: Any, texts: list[str]) -> None:
    """Refuse texts that a `CaptionEncoder` does not read: without a word, or over-long; and an encoder that is missing.

    Raises:
        ValueError: names the text, or what to pass in place of the encoder.
    """
    if text_encoder is None:
        raise ValueError(
            "this pipeline was loaded without a text encoder; pass prompt_embeds, or set pipe.text_encoder."
        )
    text_encoder.word_ids(texts)


def check_words(text_encoder: Any, tokenizer: Any, texts: list[str]) -> None:
    """As `check_own_words`, or of an encoder of transformers: refuse texts without a word, and a missing tokenizer.

    Raises:
        ValueError: names the text, or what to pass in place of encoder or tokenizer.
    """
    if text_encoder is None or hasattr(text_encoder, "word_ids"):
        return check_own_words(text_encoder, texts)
    if tokenizer is None:
        raise ValueError("the text encoder has no tokenizer; pass prompt_embeds, or set pipe.tokenizer.")
    for text in texts:
        if not text.strip():
            raise ValueError(f"prompt {text!r} has no words; give at least one.")


def check_generator(generator: Any, pictures: int, noun: str = "picture") -> None:
    """Refuse what is neither None, one `torch.Generator`, nor a list of one per picture, or per what `noun` says.

    Raises:
        TypeError, ValueError: names what was given, and what to pass.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, (list, tuple)):
        raise TypeError(
            f"generator is a {type(generator).__name__}; pass a torch.Generator or a list of them."
        )
    if len(generator) != pictures:
        raise ValueError(
            f"{len(generator)} generators for {pictures} {noun}s; pass one per {noun}, or a single one."
        )
    kinds = sorted({type(item).__name__ for item in generator if not isinstance(item, torch.Generator)})
    if kinds:
        raise TypeError(
            f"the generator list also holds {', '.join(kinds)}; every entry must be a torch.Generator."
        )
