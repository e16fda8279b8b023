"""The parts of LlamaGen's transformer: rotary table, norm, attention, feed-forward layer, block (Sun et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.kernels.launch import fused
from visual_spec.kernels.layers import add_norm, gated, norm_reference
from visual_spec.kernels.rotary_write import Turns, rotary_write, rotate
from visual_spec.models.core.cache import Places, StaticCache
from visual_spec.models.core.projections import in_one_order
from visual_spec.models.core.protocol import DecodeState, check_labels


def feed_forward_width(dim: int) -> int:
    """Return the hidden width of the SwiGLU layer: two thirds of 4 * dim, rounded up to a multiple of 256."""
    return -(-int(2 * 4 * dim / 3) // 256) * 256


def rotary_table(
    side: int,
    head_dim: int,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    frames: int = 1,
    start: float = 0.0,
) -> Tensor:
    """Return cosines and sines `[frames * side * side, head_dim / 2, 2]`.

    Half of the pairs rotate by row, half by column, both counted from `start`. With several frames, the slowest quarter
    of both halves rotates by frame instead, at frequencies that halve from 1 on: within a frame the table is almost a
    picture's, so weights of a picture model are a good start.
    """
    half = head_dim // 2
    frequencies = base ** -(torch.arange(0, half, 2)[: half // 2].to(dtype) / half)  # [head_dim / 4]
    angles = torch.outer(start + torch.arange(side).to(dtype), frequencies)
    rows = angles[:, None, :].expand(side, side, -1)
    columns = angles[None, :, :].expand(side, side, -1)
    grid = torch.cat([rows, columns], -1).flatten(0, 1)
    if frames > 1:
        grid = grid.repeat(frames, 1)
        count = max(1, head_dim // 16)  # of each half
        halving = 0.5 ** torch.arange(2 * count).to(dtype)
        by_frame = torch.outer(torch.arange(frames).to(dtype), halving).repeat_interleave(side * side, 0)
        quarter = head_dim // 4
        grid[:, quarter - count : quarter] = by_frame[:, ::2]
        grid[:, -count:] = by_frame[:, 1::2]
    return torch.stack([grid.cos(), grid.sin()], -1)


def turns_of(table: Tensor) -> Turns:
    """Return what `rotate` multiplies by, from `table [R or 1, W, D / 2, 2]`."""
    cosine, sine = table[:, :, None, None].unbind(-1)
    return torch.stack([cosine, cosine], -1), torch.stack([-sine, sine], -1)


@dataclass
class Shared:
    """What all blocks of a call share.

    Attributes:
        turns: of the tokens fed; zeros make a key vanish.
        places: where the tokens' keys and values are written, and how many places are read.
        mask: additive or bool `[R, 1, W, S]`; None: a token sees the places before its own, as `window_attention` says.
        prefix_mask: bool `[R, T]`, the prefix positions that other tokens see; read where there is no mask.
    """

    turns: Turns
    places: Places
    mask: Tensor | None
    prefix_mask: Tensor


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, change: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, change: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if change is None:
            return norm_reference(x, self.weight, self.eps)
        return add_norm(x, change, self.weight, self.eps)

    def after(self, hidden: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `hidden + change [R, W, dim]`, and its norm; without a change `hidden` itself."""
        if change is None:
            return hidden, self(hidden)
        return self(hidden, change)


class Attention(nn.Module):
    one_order = False  # see `fuse_projections`

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, held: tuple[Tensor, Tensor], shared: Shared) -> Tensor:
        """Feed `x [R, W, dim]`: write keys and values into the layer's, `[R, H, S, D]`, and attend: `[R, W, dim]`."""
        if fused(x):
            return self.wo(self.mix(self.wqkv(x), held, shared))
        q, *new = self.project(x, shared.turns)
        k, v = shared.places.write(held, *new)
        assert shared.mask is not None
        return self.attend(q, k, v, shared.mask)

    def mix(self, projected: Tensor, held: tuple[Tensor, Tensor], shared: Shared) -> Tensor:
        """Write and attend by kernels, given queries, keys and values `[R, W, 3 dim]`: `[R, W, dim]`."""
        heads, slots = projected.unflatten(-1, (3 * self.heads, -1)), shared.places.slots
        q = rotary_write(heads, shared.turns, *held, slots, early=self.one_order)
        if shared.mask is None:
            from visual_spec.kernels.window_attention import window_attention  # on a GPU only

            mixed = window_attention(q, *held, slots, shared.prefix_mask, one_order=self.one_order)
            return mixed.flatten(2)
        return self.seen(q, *shared.places.read(held), shared.mask)

    def project(self, x: Tensor, turns: Turns | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[R, W, H, D]` of `x [R, W, dim]`; `turns` rotate queries and keys."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.heads, -1))  # [R, W, 3, H, D]
        q, k = (qkv[:, :, :2] if turns is None else rotate(qkv[:, :, :2], turns)).unbind(2)
        return q, k, qkv[:, :, 2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attend `q [R, W, H, D]` to `k, v [R, H, S, D]` with additive or bool `mask [R, 1, W, S]`: `[R, W, dim]`."""
        return self.wo(self.seen(q, k, v, mask))

    def seen(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """As `attend`, before the last product."""
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(gated(self.w1(x), self.w3(x)))


class TransformerBlock(nn.Module):
    one_order = False  # see `fuse_projections`
    ordered = ("attention", "feed_forward", "attention_norm", "ffn_norm")  # what a kernel reads then

    def __init__(self, dim: int, heads: int, hidden: int, eps: float):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm = RMSNorm(dim, eps)
        self.ffn_norm = RMSNorm(dim, eps)

    def forward(
        self, hidden: Tensor, change: Tensor | None, held: tuple[Tensor, Tensor], shared: Shared
    ) -> tuple[Tensor, Tensor | None]:
        """Run the block on `hidden + change [R, W, dim]`.

        Args:
            hidden, change: as the block before returned them; no change before the first block.
            held: keys and values of this block, `[R, H, S, D]`, written in place.

        Returns:
            Hidden states and a change that the next norm adds: one launch computes sum and norm. In one order of sums
            there is no change.
        """
        if self.one_order and fused(hidden):
            assert change is None  # the last product adds what it reads
            norm, attention, layer = self.attention_norm, self.attention, self.feed_forward
            projected = in_one_order(attention.wqkv, hidden, norm=norm.weight, eps=norm.eps)
            hidden = in_one_order(attention.wo, attention.mix(projected, held, shared), residual=hidden)
            norm = self.ffn_norm
            # And w3, joined.
            opened = in_one_order(layer.w1, hidden, norm=norm.weight, eps=norm.eps, gate=True)
            return in_one_order(layer.w2, opened, residual=hidden), None
        hidden, x = self.attention_norm.after(hidden, change)
        hidden, x = self.ffn_norm.after(hidden, self.attention(x, held, shared))
        return hidden, self.feed_forward(x)

    def whole(self, hidden: Tensor, turns: Turns, mask: Tensor) -> Tensor:
        """Run the block on a whole sequence `[B, N, dim]` without a cache, with bool `mask [B, 1, N, N]`."""
        q, k, v = self.attention.project(self.attention_norm(hidden), turns)
        hidden = hidden + self.attention.attend(q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return hidden + self.feed_forward(self.ffn_norm(hidden))


@dataclass
class TextCondition:
    """Caption features for a text-conditional model.

    Attributes:
        features: `[B, T, C]`, left-padded: the valid words of each row are at its end.
        mask: bool `[B, T]`, true at valid words; at least the last of each row.
        negative: captions that guidance leads away from, for as many rows; they take the place of the unconditional
            caption. None: the unconditional caption.
    """

    features: Tensor
    mask: Tensor
    negative: TextCondition | None = field(default=None, kw_only=True)

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


def check_captions(condition: object, expected: tuple[int, int, int], *, left_padded: bool = True) -> None:
    """Refuse what is no `TextCondition` (TypeError) of features [B, T, C] and masks [B, T] (ValueError).

    Args:
        expected: B, T and C.
        left_padded: whether captions end at the last position.
    """
    if not isinstance(condition, TextCondition):
        raise TypeError(f"{type(condition).__name__} given; this model takes a TextCondition(features, mask)")
    for part in condition.parts:
        if tuple(part.features.shape) != expected or tuple(part.mask.shape) != expected[:2]:
            raise ValueError(
                f"features {tuple(part.features.shape)} and mask {tuple(part.mask.shape)} given; "
                f"this model takes {expected} and {expected[:2]}"
            )
        if left_padded and not part.mask[:, -1].all():
            raise ValueError(
                "the last prefix position of a row is masked; captions are left-padded and not empty"
            )


class LabelEmbedding(nn.Module):
    """Class prefix: one position. Row `num_classes` of the table is the null class of guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, dim)

    def check(self, condition: object, batch_size: int) -> None:
        """Refuse what are no labels; errors as in `check_labels`."""
        check_labels(condition, batch_size, self.num_classes)

    def prefix(
        self, labels: Tensor, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return prefix embeddings `[R, 1, dim]` of labels `[B]` and mask `[R, 1]`; see `CaptionEmbedding.prefix`."""
        labels = labels.to(self.embedding_table.weight.device)
        if dropped is not None:
            labels = torch.where(dropped, self.num_classes, labels)
        if guided:
            labels = torch.cat([labels, torch.full_like(labels, self.num_classes)])
        embedded = self.embedding_table(labels)[:, None]
        return embedded, torch.ones(embedded.shape[:2], dtype=torch.bool, device=embedded.device)


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

    def check(self, condition: object, batch_size: int) -> None:
        """Refuse what are no captions; errors as in `check_captions`."""
        length, width = self.uncond_embedding.shape
        check_captions(condition, (batch_size, length, width))

    def prefix(
        self, condition: TextCondition, *, guided: bool = False, dropped: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return prefix embeddings `[R, T, dim]` and mask `[R, T]`, unconditional rows last when `guided`.

        These rows hold the negative captions where the condition has some.
        `dropped`, bool `[B]`, marks rows whose condition is replaced by the unconditional one (training for guidance).
        """
        learned, (features, mask) = self.uncond_embedding, self._words(condition)
        if dropped is not None:
            features = torch.where(dropped[:, None, None], learned, features)
        if guided:
            negative = condition.negative
            # Without one, both halves are masked alike, as in the official code.
            other, seen = (learned.expand_as(features), mask) if negative is None else self._words(negative)
            features, mask = torch.cat([features, other]), torch.cat([mask, seen])
        return self.cap_proj(features), mask

    def _words(self, condition: TextCondition) -> tuple[Tensor, Tensor]:
        mask = condition.mask.to(self.uncond_embedding.device)
        return condition.features.to(self.uncond_embedding) * mask[..., None], mask


def condition_embedding(
    num_classes: int | None, caption_dim: int | None, dim: int, length: int
) -> LabelEmbedding | CaptionEmbedding:
    """Return the embedding of a prefix: of a class, or of a caption of `length` words.

    Raises:
        ValueError: not exactly one of `num_classes` and `caption_dim` is given.
    """
    if num_classes is not None and caption_dim is None:
        return LabelEmbedding(num_classes, dim)
    if num_classes is None and caption_dim is not None:
        return CaptionEmbedding(caption_dim, dim, length)
    raise ValueError(
        f"num_classes={num_classes} and caption_dim={caption_dim} given; set exactly one of them"
    )


def entered(hidden: Tensor, side: Tensor | None, layer: int, num_layers: int, slots: Tensor | None) -> Tensor:
    """Return `hidden [R, W, dim]` as it enters a layer: with the side embeddings of the slots that it predicts.

    G of them are added at even distances: before layers 0, n / G, 2 n / G, ...

    Args:
        side: `[R, G, L + 1, dim]`, by slot; the last, of no slot, are zero. None: there are none.
        slots: long `[R, W]`, where each position is fed; it predicts the next slot, past the grid none. None:
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


@dataclass
class LlamaGenState(DecodeState):
    """Static cache of one decoding run.

    Attributes:
        cache: places of a row: the T positions of the prefix, the slots of the grid, and `window` more for slots past
            it. The nodes of a tree are written there until `keep` copies the accepted ones to their slots.
        rotary: `[L, D / 2, 2]`, at least float32: half precision is too coarse for angles.
        prefix_mask: bool `[R, T]`, the prefix positions that image tokens may attend to.
        features: `[R, W, dim]`, the head's input in the last call (prefill: W = 1), for drafters that read it.
        side: what is added to the positions that predict each slot, see `entered`; None: nothing.
    """

    cache: StaticCache
    rotary: Tensor
    prefix_mask: Tensor
    features: Tensor
    side: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits, self.prefix_mask = self.logits[rows], self.prefix_mask[rows]
        self.features = self.features[rows]
        self.side = None if self.side is None else self.side[rows]

    def buffers(self) -> list[Tensor]:
        return [*self.cache.buffers(), self.prefix_mask, *([] if self.side is None else [self.side])]

    def narrow(self, width: int) -> None:
        self.features = self.features[:, :width]
