"""MaskGIT's transformer as the Halton sampler's authors trained it (Chang et al. 2022; Besnier et al. 2025, section 4).

One class serves the embedded size and the official class-conditional checkpoints; parameter names are the official
keys. Every layer is modulated by the condition (AdaLN). A model of captions also attends to their words. Words see only
each other, so their keys and values are computed once a picture, and so are all modulations.

The model is bidirectional: a call scores all slots from the tokens that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.adapters import weight_of
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import decodes, loads_weights
from visual_spec.models.core.protocol import TokenGrid, check_labels, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.models.next_token.llamagen_blocks import (
    CaptionEmbedding,
    FeedForward,
    RMSNorm,
    check_captions,
    feed_forward_width,
)

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 6, "num_heads": 6, "dim": 384},
    "small": {"num_layers": 12, "num_heads": 6, "dim": 512},
    "base": {"num_layers": 12, "num_heads": 12, "dim": 768},
    "large": {"num_layers": 24, "num_heads": 16, "dim": 1024},
    "xlarge": {"num_layers": 28, "num_heads": 16, "dim": 1152},
}

_EPSILON = 1e-5  # of every norm


@dataclass
class MaskedImageState(MaskedState):
    """What one batch is conditioned on. R = B, or 2B when guided: the conditional rows, then the unconditional ones.

    Attributes:
        modulations: [layers, R, 6, dim], shift, scale and gate of attention, then of the feed-forward layer.
        head_modulation: [R, 2, dim], shift and scale before the head.
        words: keys and values of the words in every layer, [layers, 2, R, H, T, D]; T = 0 for a model of classes.
        mask: bool [R, T], the words that are there.
        held: keys and values of the last call that kept them: of all places, of the registers, and scratch places.
        features: [R, L, dim], what that call had before the head.
    """

    fixed: ClassVar[bool] = True

    modulations: Tensor
    head_modulation: Tensor
    words: Tensor
    mask: Tensor
    held: StaticCache | None = None
    features: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples, len(self.mask))
        if self.held is not None:
            self.held.select(rows)
        if self.features is not None:
            self.features = self.features[rows]
        self.modulations, self.words = self.modulations[:, rows], self.words[:, :, rows]
        self.head_modulation, self.mask = self.head_modulation[rows], self.mask[rows]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """`x [R, W, dim]` with gain 1 + `scale [R, dim]` and bias `shift [R, dim]`."""
    return x * (1 + scale[:, None]) + shift[:, None]


class NormedAttention(nn.Module):
    """Self-attention. Queries and keys are normalised over all heads together, without a gain."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        inner = heads * (dim // heads)  # 510 in the official small model, of width 512
        self.wq = nn.Linear(dim, inner, bias=False)
        self.wk = nn.Linear(dim, inner, bias=False)
        self.wv = nn.Linear(dim, inner, bias=False)
        self.wo = nn.Linear(inner, dim, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [R, H, W, D] of `x [R, W, dim]`."""
        query, key, value = self.wq(x), self.wk(x), self.wv(x)
        query, key = (_unit_mean_square(part).to(value.dtype) for part in (query, key))
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value)
        )
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`query [R, H, W, D]` over `key, value [R, H, S, D]` under a bool mask [R, 1, 1, S], or all: [R, W, dim]."""
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))


def _unit_mean_square(x: Tensor) -> Tensor:
    return F.rms_norm(wide(x), x.shape[-1:], eps=_EPSILON).to(x.dtype)


class MaskedBlock(nn.Module):
    """Attention and a SwiGLU layer; `mlp` computes their modulations from the condition."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.ln1, self.ln2 = RMSNorm(dim, _EPSILON), RMSNorm(dim, _EPSILON)
        self.attn = NormedAttention(dim, heads)
        self.ff = FeedForward(dim, feed_forward_width(dim))

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        words: Tensor | None = None,
        mask: Tensor | None = None,
        held: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `x [R, W, dim]` after this layer, and its keys and values [2, R, H, W, D].

        Args:
            modulation: [R, 6, dim].
            words: [2, R, H, T, D], keys and values that all places see besides their own.
            mask: bool [R, 1, 1, T + W], what all places see; None: everything.
            held: writes keys and values [R, W, H, D] to where they are held, and returns all that are there,
                [R, H, S, D]. The places then see S others in place of W.
        """
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.unbind(1)
        query, key, value = self.attn.project(modulated(self.ln1(x), shift, scale))
        if held is not None:
            key, value = held(key.transpose(1, 2), value.transpose(1, 2))
        own = torch.stack([key, value])
        if words is not None:
            key, value = torch.cat([words, own], 3)
        x = x + gate[:, None] * self.attn.attend(query, key, value, mask)
        return x + ff_gate[:, None] * self.ff(modulated(self.ln2(x), ff_shift, ff_scale)), own


class _FinalNorm(RMSNorm):
    """An RMSNorm with a bias."""

    def __init__(self, dim: int):
        super().__init__(dim, _EPSILON)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class TiedHead(nn.Module):
    """Scores tokens with the rows of their embedding; only the bias is its own.

    The last row and the last bias belong to the mask, which is never a token: it gets no score.
    """

    def __init__(self, outputs: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding[:-1], self.bias[:-1])


class MaskedImageTransformer(SavedModel):
    """A `MaskedModel` over a square grid of image tokens. The defaults are the official base model's at 256 pixels.

    Args:
        vocab_size: number of image codes. The mask has the next id.
        dim, num_layers, num_heads: width, depth and attention heads; `PRESETS` lists the official sizes.
        grid_size: tokens per side (16 and 24 for official 256 and 384 pixel models).
        proj: 2 merges squares of 2 x 2 tokens before the layers and splits them afterwards, an option of the official
            code; 1 does not, as the released models.
        registers: learned places after the tokens that hold none.
        num_classes: set for a class-conditional model (1000 in the official ones), else None.
        caption_dim, prefix_length: set for a model of captions: width of their features, and words of the longest.

    Raises:
        ValueError: not exactly one of `num_classes` and `caption_dim` is given, or a `proj` that is neither 1 nor 2, or
            does not divide the grid.
    """

    _repeated_blocks = ["MaskedBlock"]
    _no_split_modules = ["MaskedBlock"]

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train masked_image --eight-bits`

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        grid_size: Count = 16,
        proj: int = 1,
        registers: int = 1,
        num_classes: Count | None = 1000,
        caption_dim: Count | None = None,
        prefix_length: int = 0,
    ):
        super().__init__()
        if (num_classes is None) == (caption_dim is None):
            raise ValueError(
                f"num_classes={num_classes} and caption_dim={caption_dim} given; set exactly one of them."
            )
        if proj not in (1, 2) or grid_size % proj:
            raise ValueError(
                f"proj={proj} and grid_size={grid_size} given; proj must be 1, or 2 with an even grid."
            )
        self.grid = TokenGrid(grid_size, grid_size)
        self.vocab_size = self.mask_id = vocab_size
        self.feature_dim = dim  # of the features before the head, for a `FeatureShortcut`
        if caption_dim is None:
            assert num_classes is not None
            self.cls_emb = nn.Embedding(num_classes + 1, dim)  # the last row: no class
        else:
            self.caption = CaptionEmbedding(caption_dim, dim, prefix_length)
        self.tok_emb = nn.Embedding(vocab_size + 1, dim)
        self.pos_emb = nn.Embedding(self.grid.num_tokens, dim)
        if proj > 1:
            self.in_proj = nn.Conv2d(dim, dim, proj, stride=proj, bias=False)
            self.out_proj = nn.Conv2d(dim, proj**2 * dim, 1, bias=False)
        # Nested as the official keys are.
        self.transformer = nn.ModuleDict(
            {"layers": nn.ModuleList(MaskedBlock(dim, num_heads) for _ in range(num_layers))}
        )
        self.last_norm = nn.ModuleDict(
            {"norm_final": _FinalNorm(dim), "mlp": nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))}
        )
        self.head = TiedHead(vocab_size + 1)
        if registers:
            self.reg_tokens = nn.Embedding(registers, dim)
        self._initialise()

    def _initialise(self) -> None:
        """The official start: modulations of layers at 0, so that each layer is the identity."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.mlp[1].weight)  # pyright: ignore[reportArgumentType]

    @property
    def blocks(self) -> Sequence[MaskedBlock]:
        """The layers."""
        return self.transformer["layers"]  # pyright: ignore[reportReturnType]

    # -- condition -----------------------------------------------------------------------------------------------------

    def check_condition(self, condition: TextCondition | Tensor | None, batch_size: int) -> None:
        """Refuse a condition that does not fit this model; errors as in `check_labels` and `check_captions`.

        None, "no class" or "no caption", fits every model.
        """
        if condition is None:
            return
        if self.config["caption_dim"] is None:
            return check_labels(condition, batch_size, self.config["num_classes"])
        expected = (batch_size, self.config["prefix_length"], self.config["caption_dim"])
        check_captions(condition, expected, left_padded=False)
        assert isinstance(condition, TextCondition)
        if not condition.mask.any(1).all():
            raise ValueError("a caption without a word given; give at least one.")

    def embed_condition(
        self,
        condition: TextCondition | Tensor | None,
        batch_size: int,
        *,
        guided: bool = False,
        dropped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the condition of all layers `[R, dim]`, words `[R, T, dim]`, and their mask, bool `[R, T]`.

        Args:
            guided: whether unconditional rows follow the conditional ones.
            dropped: bool [B], rows whose condition is replaced by none (training for guidance).
        """
        device = self.tok_emb.weight.device
        if dropped is None:
            dropped = torch.full((batch_size,), condition is None, device=device)
        if guided:
            dropped = torch.cat([dropped, torch.ones_like(dropped)])
        repeats = len(dropped) // batch_size
        if self.config["caption_dim"] is None:
            null = self.config["num_classes"]
            labels = torch.full_like(dropped, null, dtype=torch.long)
            if condition is not None:
                assert isinstance(condition, Tensor)
                labels = torch.where(dropped, null, condition.repeat(repeats))
            embedded = self.cls_emb(labels)
            return embedded, embedded[:, None][:, :0], dropped[:, None][:, :0]
        words = self.caption.cap_proj(self.caption.uncond_embedding).expand(len(dropped), -1, -1)
        mask = torch.ones(words.shape[:2], dtype=torch.bool, device=device)
        if condition is not None:
            assert isinstance(condition, TextCondition)
            parts = [condition] * repeats
            if guided and condition.negative is not None:  # it takes the place of "no caption"
                parts = [condition, condition.negative]
                dropped = torch.cat([dropped[:batch_size], torch.zeros_like(dropped[batch_size:])])
            captions = self.caption.cap_proj(torch.cat([part.features for part in parts]).to(words.dtype))
            words = torch.where(dropped[:, None, None], words, captions)
            mask = dropped[:, None] | torch.cat([part.mask for part in parts])
        weights = mask.to(words.dtype)
        mean = (words * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return mean, words, mask

    def _state(self, embedded: Tensor, words: Tensor, mask: Tensor, guided: bool) -> MaskedImageState:
        """Compute everything that depends on the condition only, with gradients."""
        modulations = torch.stack([block.mlp(embedded).unflatten(1, (6, -1)) for block in self.blocks])
        seen, keys = mask[:, None, None], []  # [R, 1, 1, T]
        for block, modulation in zip(self.blocks, modulations, strict=True):
            if words.shape[1]:
                words, own = block(words, modulation, mask=seen)
            else:
                rows, heads = len(words), self.config["num_heads"]
                own = words.new_zeros(2, rows, heads, 0, words.shape[2] // heads)
            keys.append(own)
        return MaskedImageState(
            guided=guided,
            device=embedded.device,
            modulations=modulations,
            head_modulation=self.last_norm["mlp"](embedded).unflatten(1, (2, -1)),
            words=torch.stack(keys),
            mask=mask,
        )

    # -- the MaskedModel contract --------------------------------------------------------------------------------------

    @decodes
    def prepare(
        self, condition: TextCondition | Tensor | None, *, batch_size: int, guided: bool
    ) -> MaskedImageState:
        """Compute everything that depends on the condition only; see `MaskedModel`."""
        self.check_condition(condition, batch_size)
        return self._state(*self.embed_condition(condition, batch_size, guided=guided), guided)

    @decodes
    def forward(
        self,
        state: MaskedImageState,
        tokens: Tensor,
        stage: int = 0,
        *,
        keep: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits `[R, L, V]` of every slot, given `tokens [B, L, 1]` with the mask id where they are hidden.

        `keep` and `places` are as in `ReusingMaskedModel`. The registers are computed in every call.
        """
        tokens = tokens[..., 0]
        if state.guided:
            tokens = tokens.repeat(2, 1)
            places = None if places is None else places.repeat(2, 1)
        if places is not None:
            return self.scores(state, self._local(state, tokens, places))
        if keep is None:
            return self.scores(state, self._whole(state, tokens))
        count = self.grid.num_tokens // self.config["proj"] ** 2 + self.config["registers"]
        rows, width = len(tokens), count + keep
        if state.held is None or state.held.num_slots != width:
            heads = self.config["num_heads"]
            shape = (len(self.blocks), rows, heads, width, self.config["dim"] // heads)
            state.held = StaticCache.allocate(state.modulations, shape)
        state.held.at(torch.arange(count, device=tokens.device).expand(rows, -1), count)
        state.features = self._whole(state, tokens, state.held)
        return self.scores(state, state.features)

    @loads_weights
    def scores(self, state: MaskedImageState, features: Tensor, stage: int = 0) -> Tensor:
        """Logits `[R, W, V]` of features `[R, W, dim]`."""
        shift, scale = state.head_modulation.unbind(1)
        hidden = modulated(self.last_norm["norm_final"](features), shift, scale)
        return wide(self.head(hidden, self.tok_emb.weight))

    def _whole(self, state: MaskedImageState, tokens: Tensor, held: StaticCache | None = None) -> Tensor:
        """Features `[R, L, dim]` of tokens `[R, L]`, with gradients."""
        hidden = self._merge(self.tok_emb(tokens) + self.pos_emb.weight)  # [R, N, dim]
        return self._split(self._layers(state, hidden, held))

    def _local(self, state: MaskedImageState, tokens: Tensor, places: Tensor) -> Tensor:
        """Features `[R, n, dim]` at places `[R, n]` of tokens `[R, L]`, with what is held of all others."""
        if state.held is None:
            raise ValueError("places given, but nothing is held; call the model with keep=n first.")
        grid, proj = self.grid, self.config["proj"]
        count, side = grid.num_tokens // proj**2, grid.width // proj
        past, slots = places >= grid.num_tokens, places.clamp(max=grid.num_tokens - 1)
        row, column = slots // grid.width, slots % grid.width
        at = row // proj * side + column // proj  # [R, n], places of the layers
        if proj == 1:
            hidden = self.tok_emb(tokens.gather(1, slots)) + self.pos_emb(slots)
        else:
            merged = self._merge(self.tok_emb(tokens) + self.pos_emb.weight)
            hidden = merged.gather(1, at[..., None].expand(-1, -1, merged.shape[-1]))
            # Tokens of one square have one place, which is written once.
            past = past | (at[:, :, None] == at[:, None]).tril(-1).any(-1)
        registers = self.config["registers"]
        scratch = count + registers + torch.arange(at.shape[1], device=at.device)
        kept = torch.arange(count, count + registers, device=at.device).expand(len(at), -1)
        state.held.at(torch.cat([torch.where(past, scratch, at), kept], 1), count + registers)
        hidden = self._layers(state, hidden, state.held)
        if proj == 1:
            return hidden
        corner = row % proj * proj + column % proj  # [R, n], of the token in its square
        wide = F.linear(hidden, weight_of(self.out_proj)[:, :, 0, 0]).unflatten(-1, (-1, proj**2))
        return wide.gather(-1, corner[..., None, None].expand(-1, -1, wide.shape[2], 1))[..., 0]

    def _layers(self, state: MaskedImageState, hidden: Tensor, held: StaticCache | None) -> Tensor:
        """The output of the layers at places `hidden [R, W, dim]`."""
        places = hidden.shape[1]
        if self.config["registers"]:
            hidden = torch.cat([hidden, self.reg_tokens.weight.expand(len(hidden), -1, -1)], 1)
        words, mask = state.mask.shape[1], None
        if words:
            seen = hidden.shape[1] if held is None else held.places.size
            mask = F.pad(state.mask, (0, seen), value=True)[:, None, None]
        for index, block in enumerate(self.blocks):
            keys = state.words[index] if words else None
            write = None if held is None else partial(held.update, index)
            hidden, _ = block(hidden, state.modulations[index], keys, mask, write)
        return hidden[:, :places]

    def _merge(self, x: Tensor) -> Tensor:
        """Tokens `[R, L, dim]` as places of the layers."""
        if self.config["proj"] == 1:
            return x
        return self.in_proj(x.mT.unflatten(2, (self.grid.height, -1))).flatten(2).mT

    def _split(self, x: Tensor) -> Tensor:
        """Places of the layers as tokens `[R, L, dim]`."""
        proj = self.config["proj"]
        if proj == 1:
            return x
        maps = self.out_proj(x.mT.unflatten(2, (self.grid.height // proj, -1)))
        return F.pixel_shuffle(maps, proj).flatten(2).mT

    # -- training ------------------------------------------------------------------------------------------------------

    def predictions(
        self, tokens: Tensor, condition: TextCondition | Tensor | None, dropped: Tensor | None = None
    ) -> Tensor:
        """Logits `[B, L, V]` of pictures `tokens [B, L]` with hidden tokens, with gradients.

        `dropped`, bool [B]: rows whose condition is replaced by none.
        """
        embedded = self.embed_condition(condition, len(tokens), dropped=dropped)
        state = self._state(*embedded, guided=False)
        return self.scores(state, self._whole(state, tokens))
