"""What LlamaGen's image tokens follow or are drawn beside: classes, captions, and side embeddings of slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.labels import check_labels


@dataclass
class TextCondition:
    """Caption features for a text-conditional model.

    It unpacks to what the calls of pipelines take: prompt_embeds, prompt_attention_mask, negative_prompt_embeds and
    negative_prompt_attention_mask, of which the last two may be None.

    Attributes:
        features: `[B, T, C]`, left-padded: the valid words of each row are at its end.
        mask: bool `[B, T]`, true at valid words; at least the last of each row.
        negative: captions that guidance leads away from, for as many rows; they take the place of the unconditional
            caption. None: the unconditional caption.
    """

    features: Tensor
    mask: Tensor
    negative: TextCondition | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[Tensor | None]:
        negative = (None, None) if self.negative is None else (self.negative.features, self.negative.mask)
        return iter((self.features, self.mask, *negative))

    @property
    def parts(self) -> list[TextCondition]:
        """The condition, and the negative one if there is one."""
        return [self] if self.negative is None else [self, self.negative]


def tensors_of(condition: TextCondition | Tensor) -> tuple[Tensor, ...]:
    """Return the labels, or the features and mask of the captions and of the negative ones."""
    if isinstance(condition, Tensor):
        return (condition,)
    return tuple(tensor for part in condition.parts for tensor in (part.features, part.mask))


def condition_of(tensors: tuple[Tensor, ...]) -> TextCondition | Tensor:
    """Return the condition that has these tensors (`tensors_of`)."""
    if len(tensors) == 1:
        return tensors[0]
    parts = [TextCondition(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
    return TextCondition(*tensors[:2], negative=parts[1] if len(parts) > 1 else None)


def check_captions(condition: object, expected: tuple[int, int, int]) -> None:
    """Refuse what is no `TextCondition` of features [B, T, C] and masks [B, T].

    Raises:
        TypeError: it is something else.
        ValueError: it has other shapes, or an empty caption.
    """
    if not isinstance(condition, TextCondition):
        raise TypeError(f"{type(condition).__name__} given; this model takes a TextCondition(features, mask)")
    for part in condition.parts:
        if tuple(part.features.shape) != expected or tuple(part.mask.shape) != expected[:2]:
            raise ValueError(
                f"features {tuple(part.features.shape)} and mask {tuple(part.mask.shape)} given; "
                f"this model takes {expected} and {expected[:2]}"
            )
        if not part.mask[:, -1].all():
            raise ValueError(
                "the last prefix position of a row is masked; captions are left-padded and not empty"
            )


class LabelEmbedding(nn.Module):
    """Class prefix: one position. Row `num_classes` of the table is the null class of guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, dim)


class CaptionProjection(nn.Module):
    """Two layers without biases, and a GELU between them."""

    def __init__(self, caption_dim: int, dim: int):
        super().__init__()
        self.fc1 = nn.Linear(caption_dim, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedding(nn.Module):
    """Caption prefix: projected text features; `uncond_embedding` replaces the caption in guidance rows."""

    def __init__(self, caption_dim: int, dim: int, length: int):
        super().__init__()
        self.cap_proj = CaptionProjection(caption_dim, dim)
        self.uncond_embedding = nn.Parameter(torch.randn(length, caption_dim) / caption_dim**0.5)


def check_condition(
    embedding: LabelEmbedding | CaptionEmbedding, condition: TextCondition | Tensor, batch_size: int
) -> None:
    """Refuse a condition that an embedding cannot read. Errors as in `check_labels` and `check_captions`."""
    if isinstance(embedding, LabelEmbedding):
        return check_labels(condition, batch_size, embedding.num_classes)
    length, width = embedding.uncond_embedding.shape
    check_captions(condition, (batch_size, length, width))


def entered(hidden: Tensor, side: Tensor | None, layer: int, num_layers: int, slots: Tensor | None) -> Tensor:
    """Return `hidden [R, W, dim]` as it enters a layer: with the side embeddings of the slots that it predicts.

    G of them are added at even distances: before layers 0, n / G, 2 n / G, ...

    Args:
        side: `[R, G, L + 1, dim]`, by slot; the last, of no slot, are zero. None: there are none.
        slots: long `[R, W]`, where each position is fed; it predicts the slot behind, those past the grid none. None:
            the prefix, whose last position predicts slot 0, and the others none.
    """
    if side is None:
        return hidden
    group, rest = divmod(layer, num_layers // side.shape[1])
    if rest or group >= side.shape[1]:
        return hidden
    if slots is None:
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + side[:, group, :1]], 1)
    at = (slots + 1).clamp_max(side.shape[2] - 1)[..., None].expand_as(hidden)
    return hidden + side[:, group].gather(1, at)
