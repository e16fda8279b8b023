"""The embedded family's text encoder: a small bidirectional transformer over words, trained with the image model.

It replaces the flan-t5-xl of the official text-conditional LlamaGen; features are left-padded as there.
"""

from __future__ import annotations

import re
import warnings

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import TextCondition

_WORD = re.compile(r"\w+")
_PADDING, _UNKNOWN, _FIRST_WORD = 0, 1, 2


def split_words(text: str) -> list[str]:
    """Return the lower-case words of a text, without punctuation."""
    return _WORD.findall(text.lower())


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        # [B, H, T, D]
        q, k, v = rearrange(self.qkv(self.norm1(x)), "b t (n h d) -> n b h t d", n=3, h=self.heads)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(rearrange(seen, "b h t d -> b t (h d)"))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CaptionEncoder(SavedModel):
    """Maps words to features.

    Args:
        vocabulary: the known words; any other word becomes the unknown word.
        dim, num_layers, num_heads: size of the transformer; `dim` is the caption width of the image model.
        max_words: longest caption, which is also the image model's prefix length.
    """

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train motion`

    @register_to_config
    def __init__(
        self,
        vocabulary: list[str] | tuple[str, ...] = (),
        dim: Count = 128,
        num_layers: int = 2,
        num_heads: Count = 4,
        max_words: int = 20,  # noqa: B006
    ):
        super().__init__()
        self.max_words = max_words
        self.word_embedding = nn.Embedding(len(vocabulary) + _FIRST_WORD, dim)
        self.position_embedding = nn.Embedding(max_words, dim)
        self.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self._ids = {word: index + _FIRST_WORD for index, word in enumerate(vocabulary)}

    def unknown_words(self, prompts: list[str]) -> list[str]:
        """Return the words of the prompts that the encoder does not know, each once, in order."""
        words = (word for prompt in prompts for word in split_words(prompt))
        return list(dict.fromkeys(word for word in words if word not in self._ids))

    def check_prompts(self, prompts: list[str]) -> None:
        """Refuse prompts without a word, by ValueError."""
        for prompt in prompts:
            if not split_words(prompt):
                raise ValueError(f"prompt {prompt!r} has no words; give at least one")

    def word_ids(self, prompts: list[str]) -> Tensor:
        """Return left-padded word ids `[B, max_words]`. Words beyond `max_words` are cut off, with a warning.

        Raises:
            ValueError: a prompt has no word.
        """
        self.check_prompts(prompts)
        rows = []
        for prompt in prompts:
            words = split_words(prompt)
            if len(words) > self.max_words:
                warn_cut(prompt, " ".join(words[self.max_words :]), self.max_words, "words")
            ids = [self._ids.get(word, _UNKNOWN) for word in words[: self.max_words]]
            rows.append([_PADDING] * (self.max_words - len(ids)) + ids)
        return torch.tensor(rows, dtype=torch.long, device=self.word_embedding.weight.device)

    @loads_weights
    def forward(self, prompts: list[str] | Tensor) -> TextCondition:
        """Return features `[B, max_words, dim]` and mask of prompts, or of word ids `[B, max_words]`.

        Raises:
            ValueError: as in `word_ids`.
        """
        ids = prompts if isinstance(prompts, Tensor) else self.word_ids(prompts)
        mask = ids != _PADDING
        # Positions count from the first word of the caption, wherever the padding places it.
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        x = self.word_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return TextCondition(self.norm(x) * mask[..., None], mask)


def warn_cut(prompt: str, cut: str, limit: int, unit: str) -> None:
    """Warn that the end of a prompt is not read.

    Args:
        prompt: the whole prompt.
        cut: the part that is left out.
        limit: the most that the encoder reads, in `unit`, such as "words".
    """
    begin = prompt if len(prompt) <= 60 else prompt[:57] + "..."
    warnings.warn(
        f"the text encoder reads at most {limit} {unit}; {cut!r} at the end of the prompt {begin!r} is cut off.",
        stacklevel=2,
    )
