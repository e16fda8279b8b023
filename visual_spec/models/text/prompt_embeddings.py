"""Prompts of Lumina-DiMOO: the template around a text, its token ids, and what the model's own table makes of them."""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from visual_spec.files.whole import written_whole
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import TextCondition

TEMPLATE = "<system>Generate an image according to the text prompt.</system><user>{}</user>"
NOTHING = "<uncondition>"  # in place of a text, where guidance leads away from
_MARKS = ("<system>", "</system>", "<user>", "</user>", NOTHING)


class PromptEmbeddings(SavedModel):
    """Turns prompts into the first words of a sequence of a language model that reads and draws in one.

    A folder holds the table and the files of the tokenizer.

    Args:
        num_words: rows of the table.
        dim: width of the model.
    """

    tokenizer: Any = None

    @register_to_config
    def __init__(self, num_words: Count, dim: Count):
        super().__init__()
        self.table = nn.Embedding(num_words, dim)

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read texts by this tokenizer from now on. Returns the model.

        Raises:
            ValueError: a mark of the template is not one token, or is not in the table.
        """
        for mark in _MARKS:
            ids = tokenizer(mark, add_special_tokens=False).input_ids
            if len(ids) != 1 or ids[0] >= self.config["num_words"] or tokenizer.decode(ids) != mark:
                raise ValueError(
                    f"the tokenizer reads {mark!r} as {ids}, and the template needs one token for it, below "
                    f"{self.config['num_words']}; pass the tokenizer of Lumina-DiMOO."
                )
        self.tokenizer = tokenizer
        return self

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:  # pyright: ignore
        """As `SavedModel.from_pretrained`, with the tokenizer of the same folder."""
        model = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        folder = os.path.join(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        return model.with_tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `SavedModel.save_pretrained`, with the tokenizer in the same folder."""
        with written_whole(save_directory) as folder:
            super().save_pretrained(folder, *args, **kwargs)
            self.tokenizer.save_pretrained(folder)

    def unknown_words(self, prompts: list[str]) -> list[str]:
        """Return no words: the tokenizer spells every word in pieces."""
        return []

    def check_prompts(self, prompts: list[str]) -> None:
        """Refuse, by ValueError, prompts without words, and those with a token that has a meaning in sequences."""
        reserved = [token for token in self.tokenizer.get_added_vocab() if token.startswith("<")]
        for prompt in prompts:
            if not prompt.strip():
                raise ValueError(f"prompt {prompt!r} has no words; give at least one.")
            if inside := sorted(token for token in reserved if token in prompt):
                raise ValueError(
                    f"prompt {prompt!r} holds {', '.join(inside)}, which would break the template {TEMPLATE!r}; pass "
                    "what the picture shows alone."
                )

    def ids(self, text: str) -> list[int]:
        """Token ids of a text in its template."""
        return self.tokenizer(TEMPLATE.format(text)).input_ids

    @decodes
    def forward(self, prompts: list[str]) -> TextCondition:
        """Embedded prompts in their template, `[B, T, dim]`, words first, and their mask.

        Raises:
            ValueError: as of `check_prompts`.
        """
        self.check_prompts(prompts)
        rows = [torch.tensor(self.ids(prompt), device=self.device) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_value=-1)
        return TextCondition(self.table(ids.clamp(min=0)), ids >= 0)
