"""Lumina-DiMOO: a language model of masked tokens that draws pictures (Xin et al., 2510.06308; Apache-2.0).

A layer is a LLaDA's: a Llama's that sees the whole sequence. A sequence is the prompt in its template, two tokens that
begin an answer and a picture, the rows of the picture, each with a token for its end, and two tokens that end both.
Parameter names of the layers are the official keys.

Of the official table of tokens a picture needs the codes, the mask, and five tokens around rows; `PromptEmbeddings` has
the words. Of the official head it needs the codes. What answers in words is not read.

Attention knows the order by rotary positions alone, so here the picture stands before the prompt in memory: slots then
have the same places in every row, whatever the length of its prompt, and padding comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.models.llama.modeling_llama import rotate_half

from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import decodes, loads_weights
from visual_spec.models.core.protocol import TokenGrid, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.next_token.llamagen_blocks import RMSNorm

# Official ids: of the first code, and of what a picture needs besides, in the order of our table after the codes.
FIRST_CODE = 126356
MASK, NEWLINE, BEGIN_ANSWER, BEGIN_IMAGE, END_IMAGE, END_ANSWER = AROUND = (
    126336, 126084, 126354, 126349, 126350, 126355,
)  # fmt: skip
_EPSILON = 1e-5  # of every norm
MOST_TOKENS = 4608  # of a picture: the released example of 1536 x 768 pixels has the most


@dataclass
class DimooState(MaskedState):
    """One batch. R = B, or 2B when guided. S = N + T places: of a picture with what is around it, and of a prompt.

    Attributes:
        prompts: [R, T, dim], embedded, words first.
        lengths: long [R], words of each prompt.
        frame: long [N], rows of our table: what is around a picture, and 0 at its slots.
        slots: long [L], the places of the slots.
        places: long [R, S], the position of each place in the sequence.
        turns: their cosines and sines, [R, 1, S, D].
        seen: bool [R, 1, 1, S], the places that are there; None: all.
        held: keys and values of the last call that kept them, and of scratch places.
        features: [R, S, dim], what that call had before the head.
        logits: [R, S, V], of all places, as calls of the least sure ones left them; None before the first of these.
    """

    fixed: ClassVar[bool] = True

    prompts: Tensor
    lengths: Tensor
    frame: Tensor
    slots: Tensor
    places: Tensor
    turns: tuple[Tensor, Tensor]
    seen: Tensor | None
    held: StaticCache | None = None
    features: Tensor | None = None
    logits: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples, len(self.lengths))
        self.turns = self.turns[0][rows], self.turns[1][rows]
        for name in ("prompts", "lengths", "places", "seen", "features", "logits"):
            if (of_all := getattr(self, name)) is not None:
                setattr(self, name, of_all[rows])
        if self.held is not None:
            self.held.select(rows)


class DimooLayer(nn.Module):
    """Attention to all places, and a SwiGLU layer. Refuses a width that is no multiple of twice the heads."""

    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        if dim % (2 * heads):
            raise ValueError(f"dim={dim} and num_heads={heads} given; pass a multiple of twice the heads.")
        self.heads = heads
        self.attn_norm, self.ff_norm = RMSNorm(dim, _EPSILON), RMSNorm(dim, _EPSILON)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.attn_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.ff_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.ff_out = nn.Linear(hidden, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        seen: Tensor | None = None,
        held: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """`x [R, W, dim]` after this layer.

        Args:
            turns: cosines and sines of the positions of `x`, [R, 1, W, D].
            seen: bool [R, 1, 1, S], what all places see; None: everything.
            held: writes keys and values [R, W, H, D] to where they are held, and returns all that are there.
            context: [R, W, dim], what is seen in place of `x`. A row that sees nothing of it adds nothing.
        """
        normed = self.attn_norm(x)
        source = normed if context is None else self.attn_norm(context)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q_proj(normed), self.k_proj(source), self.v_proj(source))
        )
        query, key = _rotated(query, turns), _rotated(key, turns)
        if held is not None:
            key, value = held(key.transpose(1, 2), value.transpose(1, 2))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        if context is not None and seen is not None:
            out = out.masked_fill(~seen.any(-1, keepdim=True), 0)
        x = x + self.attn_out(out.transpose(1, 2).flatten(2))
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))


def turns_of(places: Tensor, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, 1, S, size] of positions, long [R, S], in 32 bits at least."""
    exact = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(0, size, 2, device=places.device, dtype=exact) / size
    angles = places[:, None, :, None] * (base**-pairs).repeat(2)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """`x [R, H, W, D]` at its positions, computed in 32 bits at least."""
    whole = wide(x)
    return (whole * turns[0] + rotate_half(whole) * turns[1]).to(x.dtype)


class DimooTransformer(SavedModel):
    """A `ReusingMaskedModel` over the tokens of a picture of any size. The defaults are the official ones.

    Args:
        vocab_size: number of image codes. The mask has the next id.
        dim, num_layers, num_heads, hidden: width, depth, attention heads, and width of the feed-forward layers.
        grid_height, grid_width: tokens of a picture where a call names no size.
        null_length: tokens of the prompt that guidance leads away from.
        rotary_base: of the positions.

    Raises:
        ValueError: a width that is no multiple of twice the heads.
    """

    _repeated_blocks = ["DimooLayer"]
    _no_split_modules = ["DimooLayer"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 8192,
        dim: int = 4096,
        num_layers: Count = 32,
        num_heads: Count = 32,
        hidden: Count = 12288,
        grid_height: Count = 64,
        grid_width: Count = 64,
        null_length: Count = 14,
        rotary_base: float = 500000.0,
    ):
        super().__init__()
        self.grid = TokenGrid(grid_height, grid_width)
        self.vocab_size = self.mask_id = vocab_size
        self.tok_emb = nn.Embedding(vocab_size + len(AROUND), dim)
        self.null_prompt = nn.Parameter(torch.zeros(null_length, dim))
        self.blocks = nn.ModuleList(DimooLayer(dim, num_heads, hidden) for _ in range(num_layers))
        self.ln_f = RMSNorm(dim, _EPSILON)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def with_grid(self, height: int, width: int) -> DimooTransformer:
        """Return this model over a picture of `height x width` tokens, with the same weights.

        Raises:
            ValueError: more tokens than the released examples have.
        """
        if (height, width) == (self.grid.height, self.grid.width):
            return self
        if height * width > MOST_TOKENS:
            raise ValueError(
                f"{height} x {width} tokens asked for; this model draws up to {MOST_TOKENS} in all."
            )
        other = copy(self)
        other.grid = TokenGrid(height, width)
        return other

    # -- the MaskedModel contract --------------------------------------------------------------------------------------

    def check_condition(self, condition: object, batch_size: int) -> None:
        """Refuse what is no `TextCondition` (TypeError) of embedded prompts for this batch and model (ValueError)."""
        if not isinstance(condition, TextCondition):
            raise TypeError(
                f"{type(condition).__name__} given; Lumina-DiMOO takes a TextCondition of embedded prompts "
                "(PromptEmbeddings)."
            )
        for part in condition.parts:
            given, wanted = tuple(part.features.shape), (batch_size, "words", self.config["dim"])
            if given[::2] != wanted[::2] or given[:2] != tuple(part.mask.shape):
                raise ValueError(
                    f"features {given} and mask {tuple(part.mask.shape)} given; this model takes {wanted} and "
                    f"{wanted[:2]}."
                )
            if not part.mask.any(1).all():
                raise ValueError("a prompt without a word given; give at least its template.")

    @decodes
    def prepare(self, condition: TextCondition, *, batch_size: int, guided: bool) -> DimooState:
        """See `MaskedModel`. Guidance leads away from the negative prompt, or from the published empty one."""
        self.check_condition(condition, batch_size)
        parts, device, count = condition.parts, self.null_prompt.device, self.vocab_size
        rows = [row[mask] for row, mask in zip(parts[0].features, parts[0].mask, strict=True)]
        if guided and len(parts) > 1:
            rows += [row[mask] for row, mask in zip(parts[1].features, parts[1].mask, strict=True)]
        elif guided:
            rows += [self.null_prompt] * batch_size
        prompts = pad_sequence([row.to(self.null_prompt) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows], device=device)

        # The frame of a picture, and the positions of all places.
        height, width, words = (
            self.grid.height,
            self.grid.width,
            torch.arange(prompts.shape[1], device=device),
        )
        _, newline, *around = (count + index for index in range(len(AROUND)))
        lines = torch.zeros(height, width + 1, dtype=torch.long, device=device)
        lines[:, -1] = newline
        ends = torch.tensor(around, device=device)
        frame = torch.cat([ends[:2], lines.flatten(), ends[2:]])
        slots = 2 + torch.arange(lines.numel(), device=device).view_as(lines)[:, :-1].flatten()
        own = lengths[:, None] + torch.arange(len(frame), device=device)
        places = torch.cat([own, words.expand(len(rows), -1)], 1)  # [R, S]
        size = self.config["dim"] // self.config["num_heads"]
        there = torch.cat([torch.ones_like(own, dtype=torch.bool), words < lengths[:, None]], 1)
        alike = len({len(row) for row in rows}) == 1
        return DimooState(
            guided=guided,
            device=device,
            prompts=prompts,
            lengths=lengths,
            frame=frame,
            slots=slots,
            places=places,
            turns=turns_of(places, size, self.config["rotary_base"], prompts.dtype),
            seen=None if alike else there[:, None, None],
        )

    @decodes
    def forward(
        self,
        state: DimooState,
        tokens: Tensor,
        stage: int = 0,
        *,
        keep: int | None = None,
        places: Tensor | None = None,
        least: float | None = None,
    ) -> Tensor:
        """Logits `[R, L, V]` of every slot, given `tokens [B, L, 1]` with the mask id where they are hidden.

        `keep` and `places` are as in `ReusingMaskedModel`.

        Args:
            least: after a call that kept, compute this share of all places of a row again, those of the prompt and
                around the picture too: the places whose likeliest code has the least logit. All others stay as the
                calls before left them, in what is held and in the logits.
        """
        x = self.embed(state, tokens[..., 0])
        rows, size = x.shape[:2]
        if places is None and least is None:
            if keep is not None:
                if state.held is None or state.held.num_slots != size + keep:
                    heads = self.config["num_heads"]
                    shape = (len(self.blocks), rows, heads, size + keep, x.shape[2] // heads)
                    state.held = StaticCache.allocate(x, shape)
                state.held.at(torch.arange(size, device=x.device).expand(rows, -1), size)
            features = self._layers(x, state.turns, state.seen, None if keep is None else state.held)
            if keep is not None:
                state.features, state.logits = features, None
            return self.scores(state, features)
        if state.held is None or state.features is None:
            raise ValueError("places or least given, but nothing is held; call the model with keep=n first.")
        if least is None:
            assert places is not None
            slots = places.repeat(rows // len(places), 1)
            at = state.slots[slots.clamp(max=self.grid.num_tokens - 1)]
            scratch = size + torch.arange(at.shape[1], device=at.device)
            written = torch.where(slots < self.grid.num_tokens, at, scratch)
            return self._scored(self._again(state, x, at, written))
        if state.logits is None:
            state.logits = self._scored(state.features)
        at = self._least_sure(state, least)
        new = self._scored(self._again(state, x, at, at))
        state.logits = state.logits.scatter(1, at[..., None].expand_as(new), new)
        return state.logits[:, state.slots]

    @loads_weights
    def embed(self, state: DimooState, tokens: Tensor) -> Tensor:
        """What all places begin with, [R, S, dim], of tokens [B, L]."""
        ids = state.frame.expand(len(state.lengths), -1).clone()
        ids[:, state.slots] = tokens.repeat(len(ids) // len(tokens), 1)
        return torch.cat([self.tok_emb(ids), state.prompts], 1)

    @loads_weights
    def scores(self, state: DimooState, features: Tensor, stage: int = 0) -> Tensor:
        """Logits `[R, L, V]` of features `[R, S, dim]` of all places."""
        return self._scored(features[:, state.slots])

    def _scored(self, features: Tensor) -> Tensor:
        return wide(self.head(features))

    def _layers(
        self, x: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor | None, held: StaticCache | None
    ) -> Tensor:
        """Features `[R, W, dim]` of `x [R, W, dim]`; with what is held, of all places."""
        for index, block in enumerate(self.blocks):
            x = block(x, turns, seen, None if held is None else partial(held.update, index))
        return self.ln_f(x)

    def _again(self, state: DimooState, x: Tensor, at: Tensor, written: Tensor) -> Tensor:
        """Features `[R, n, dim]` of places `at [R, n]` of `x [R, S, dim]`, whose keys are `written`, long [R, n]."""
        assert state.held is not None
        state.held.at(written, x.shape[1])
        turns = tuple(part.take_along_dim(at[:, None, :, None], 2) for part in state.turns)
        return self._layers(x.take_along_dim(at[..., None], 1), turns, state.seen, state.held)  # pyright: ignore

    def _least_sure(self, state: DimooState, share: float) -> Tensor:
        """The places of least logit, long [R, n], and padding in rows that have fewer places than the longest.

        As many as are at most the quantile `share` of all places that a row has, as the official code chooses them.
        """
        assert state.logits is not None
        size, lengths = state.logits.shape[1], len(state.frame) + state.lengths
        index = torch.arange(size, device=lengths.device)
        sure = state.logits.amax(-1).masked_fill(index >= lengths[:, None], torch.inf)
        # A product that should be whole may miss it by a rounding error.
        count = (share * (lengths - 1).double() + 1e-6).long()[:, None] + 1
        index = index[: int(share * (size - 1) + 1e-6) + 1]
        order = sure.argsort(dim=1, stable=True)[:, : len(index)]
        return torch.where(index < count, order, lengths[:, None] + index - count)
