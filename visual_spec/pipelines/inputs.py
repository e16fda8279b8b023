"""What several pipelines are given: prompts, generators, callbacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Asked:
    """What a call asks for, read and checked.

    Attributes:
        source: what the samples are drawn from: `Texts`, class numbers, or None for nothing.
        count: prompts or classes.
        each: samples of each of them; as `each_name` in the call.
        law: the law of a token, or of each scale.
        model: what draws: the transformer, for the size that is asked for, or who draws which scales.
        known: the clip that music goes on from, or None.
        tensors: names of the tensors that the callback is given.
    """

    source: Any
    count: int
    each: int
    each_name: str
    law: Any
    model: Any = None
    known: Any = None
    tensors: Sequence[str] = ()


def check_own_words(text_encoder: Any, texts: list[str]) -> None:
    """Refuse texts that a `CaptionEncoder` does not read, those without a word; and an encoder that is missing.

    Raises:
        ValueError: names the text, or what to pass in place of the encoder.
    """
    if not texts:
        return
    if text_encoder is None:
        raise ValueError(
            "this pipeline was loaded without a text encoder; pass prompt_embeds, or set pipe.text_encoder."
        )
    text_encoder.check_prompts(texts)


def check_words(text_encoder: Any, tokenizer: Any, texts: list[str]) -> None:
    """As `check_own_words`, or of an encoder of transformers: refuse texts without a word, and a missing tokenizer.

    Raises:
        ValueError: names the text, or what to pass in place of encoder or tokenizer.
    """
    if not texts or text_encoder is None or hasattr(text_encoder, "word_ids"):
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
