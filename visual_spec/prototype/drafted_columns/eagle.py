"""EAGLE for columns: a small drafter that extrapolates the features of a MusicGen, guidance included.

EAGLE (Li et al., ICML 2024) drafts tokens from the input of its target's output head. EAGLE-3 (Li et al., NeurIPS 2025,
section 3) also reads some of the target's earlier layers, and uses the drafter's own state where the target has not run
yet. Here a token is a column of K codes. MusicGen's heads are linear, so

* one state per column is enough for all codebooks, which are independent given the earlier columns;
* the logits of classifier-free guidance are the logits of guided features, u + s (c - u). So the drafter continues from
  guided features, in one row a sample, where its target needs two. Its logits are already guided.

The columns of a wave depend closely on each other (phase, and in a delay pattern the codes of one frame), so a draft
after a wrong column is mostly wrong: only drafts from exact context give a speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.columns.musicgen import MusicgenColumnModel, MusicgenState
from visual_spec.models.columns.musicgen_modules import MusicgenModules
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import DecodeState
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.drafters.eagle import attend_unrolled, check_sizes, shift


class ColumnBlock(nn.Module):
    """Self-attention and a GELU network with pre-normalisation: a MusicGen layer without text attention."""

    def __init__(self, dim: int, num_heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, H, W, D] of hidden [B, W, dim]."""
        parts = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        return query, key, value

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """Return the block's output, from its input and the attention output [B, H, W, D]."""
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.ffn_norm(hidden))))


@dataclass
class ColumnEagleState(DecodeState):
    """The drafter's state of one decode. Places are as in `MusicgenState`.

    Attributes:
        target, beside: the model, and its own state.
        guidance_scale: guidance scale of the features.
        cache: cache of all blocks, 1 + S + window places.
        features: [B, 2 + S + window, dim], by place: the features that predicted the column there, the target's where
            it has run, else the drafter's.
        observed: as `features`, but only the target's.
    """

    target: MusicgenColumnModel
    beside: MusicgenState
    guidance_scale: float
    cache: StaticCache
    features: Tensor
    observed: Tensor

    def buffers(self) -> list[Tensor]:
        return [*self.cache.buffers(), self.features, self.observed]


class ColumnEagleDrafter(SavedModel):
    """Drafts columns for a MusicGen, in one row a sample. It reads no caption: the features already depend on it.

    The embeddings, positions and heads are the target's.

    Args:
        vocab_size, num_codebooks, dim, num_layers: the target's (`ColumnEagleDrafter.for_target`).
        taps: the target's layers, counted from 1, whose output is read in addition to the last one's.
        num_blocks, num_heads, ffn_dim: sizes of the drafter.

    Raises:
        ValueError: the taps are not layers before the last.
    """

    _no_split_modules = ["ColumnBlock"]

    stored_as = (torch.float8_e4m3fn,)  # the matrices of the embedded one (scripts/assemble.py)

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 2048,
        num_codebooks: int = 4,
        dim: Count = 1024,
        num_layers: int = 24,
        taps: Sequence[int] = (2, 12),
        num_blocks: int = 1,
        num_heads: Count = 16,
        ffn_dim: int = 4096,
    ):
        super().__init__()
        if any(not 1 <= tap < num_layers for tap in taps):
            raise ValueError(
                f"taps={tuple(taps)}; pass layers from 1 to {num_layers - 1}, before the last one."
            )
        self.vocab_size = vocab_size
        # Embeddings and layer outputs differ in size by orders of magnitude.
        self.feature_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(1 + len(taps)))
        self.fuse = nn.Linear((1 + len(taps)) * dim, dim, bias=False)
        self.embedding_norm, self.state_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(2 * dim, dim, bias=False)
        self.blocks: Any = nn.ModuleList(ColumnBlock(dim, num_heads, ffn_dim) for _ in range(num_blocks))
        self.final_norm = nn.LayerNorm(dim)

    @classmethod
    def for_target(cls, model: Any, **settings: Any) -> ColumnEagleDrafter:
        """Return a fresh drafter for a MusicGen of transformers.

        Args:
            settings: taps, num_blocks, num_heads, ffn_dim; default: an early and a middle layer, one block of the
                target's own shape.
        """
        modules = MusicgenModules(model)
        config, layers = modules.config, len(modules.decoder.layers)
        usual = {
            "taps": sorted({max(1, layers // 8), layers // 2}) if layers > 1 else (),
            "num_heads": config.num_attention_heads,
            "ffn_dim": config.ffn_dim,
        }
        drafter = cls(**_sizes(modules), **usual | settings)
        # Its features go to the target's heads, so they start at the scale of the target's features.
        drafter.final_norm.load_state_dict(modules.decoder.layer_norm.state_dict())
        return drafter

    def check_target(self, target: Any) -> None:
        """Refuse a target that this drafter was not made for, by ValueError."""
        if not isinstance(target, MusicgenModules):
            raise ValueError(
                f"this drafter reads the features of a MusicGen, and got a {type(target).__name__}; use a smaller "
                "model of the same columns instead."
            )
        check_sizes(self, _sizes(target), "column_drafter")

    # -- decoding: the FeatureDrafter contract of the samplers -------------------------------------------------------

    @decodes
    def follow(
        self, model: MusicgenColumnModel, state: MusicgenState, *, window: int, guidance_scale: float
    ) -> ColumnEagleState:
        """Return the drafter's cache beside a target that has just been prefilled. A prompt's columns are fed at once.

        Raises:
            ValueError: as in `check_target`.
        """
        self.check_target(model)
        first = self.read(state.features, state.guided, guidance_scale)  # [B, 1 + P', dim]
        batch_size, places = len(first), 1 + model.num_steps + window
        heads = self.config["num_heads"]
        shape = (len(self.blocks), batch_size, heads, places, first.shape[-1] // heads)
        features = F.pad(first, (0, 0, 1, places - first.shape[1]))
        drafting = ColumnEagleState(
            logits=state.logits,
            guided=False,
            window=window,
            target=model,
            beside=state,
            guidance_scale=guidance_scale,
            cache=StaticCache.allocate(first, shape),
            features=features,
            observed=features.clone(),
        )
        if model.first_step:
            steps = torch.arange(-model.first_step, 0, device=first.device).expand(batch_size, -1)
            self(drafting, torch.zeros_like(steps)[..., None].expand(-1, -1, model.num_codebooks), steps)
            drafting.features[:, 1 : 1 + first.shape[1]] = first  # replaces the drafter's own features
        return drafting

    @decodes
    def observe(self, state: ColumnEagleState, features: Sequence[Tensor], steps: Tensor) -> None:
        """Record the features [R, W, dim] of each layer of the target, from its call at steps [B, W]."""
        read = self.read(features, state.beside.guided, state.guidance_scale)  # [B, W, dim]
        rows = torch.arange(len(steps), device=steps.device)[:, None]
        places = steps + state.target.first_step + 2
        state.observed[rows, places] = read
        # A call that commits nothing makes the drafter read its newest column again. The feature there has been
        # replaced by the drafter's own if the drafter read the column before it in the same call.
        places = torch.cat([places[:, :1] - 1, places], 1)
        state.features[rows, places] = state.observed[rows, places]

    @decodes
    def forward(self, state: ColumnEagleState, tokens: Tensor, steps: Tensor) -> Tensor:
        """Feed columns [B, W, K] at steps [B, W]; guided logits [B, W, K, V], position w predicting step
        `steps[b, w] + 1`.

        Reads the features of `steps` and writes its own for the steps after them, so that the next call can continue
        from there.
        """
        target, beside = state.target, state.beside
        at = steps + target.first_step  # [B, W]
        rows, places = torch.arange(len(at), device=at.device)[:, None], 1 + at
        tokens = torch.where(beside.free[at], tokens, beside.forced[rows, at])
        seen = state.cache.causal(places)
        seen[..., :1].zero_()  # at place 0, the empty step, the drafter holds nothing
        hidden = self._mix(target, tokens, state.features[rows, places])
        hidden = hidden + beside.positions[places.clamp_max(target.num_steps)]
        for index, block in enumerate(self.blocks):
            query, key, value = block.project(hidden)
            keys, values = state.cache.update(index, key.transpose(1, 2), value.transpose(1, 2))
            mixed = F.scaled_dot_product_attention(query, keys, values, seen[:, None])
            hidden = block.finish(hidden, mixed)
        state.features[rows, places + 1] = hidden
        return target.score(self.final_norm(hidden))

    # -- parts -------------------------------------------------------------------------------------------------------

    def read(self, hidden: Sequence[Tensor], guided: bool, guidance_scale: float | Tensor) -> Tensor:
        """Return the drafter's input from the target's layers: [B, W, dim].

        Args:
            hidden: the output [R, W, dim] of each layer, the last one's normalised.
            guidance_scale: a number, or [B, 1, 1].
        """
        last = hidden[-1]
        early = [hidden[tap - 1] for tap in self.config["taps"]]
        if guided:
            last, unconditional = last.chunk(2)
            last = unconditional + guidance_scale * (last - unconditional)
            early = [layer[: len(last)] for layer in early]
        parts = [norm(part) for norm, part in zip(self.feature_norms, [last, *early], strict=True)]
        return self.fuse(torch.cat(parts, -1))

    def _mix(self, target: MusicgenModules, tokens: Tensor, features: Tensor) -> Tensor:
        embeddings = self.embedding_norm(target.embed(tokens))
        return self.mix(torch.cat([embeddings, self.state_norm(features)], -1))

    # -- training ----------------------------------------------------------------------------------------------------

    def unrolled(
        self, target: MusicgenColumnModel, sequence: Tensor, features: Tensor, steps: int
    ) -> list[Tensor]:
        """The input of the drafter's heads on whole clips when it continues from its own features, with gradients.

        See `EagleDrafter.unrolled`, with columns in place of slots.

        Args:
            sequence: long [B, N, K], columns as the target takes them, fed at steps 0 to N - 1 of the pattern.
            features: [B, N, dim], from `read`, those that predicted these columns.

        Returns:
            One [B, N, dim] for each step, which predicts steps 1 to N. In step t the first t - 1 have no meaning.
        """
        length = sequence.shape[1]
        positions = target.position_table(1 + length)[1:].to(features)
        distance = torch.arange(length, device=sequence.device)
        distance = distance[:, None] - distance  # [N, N], query minus key
        outputs: list[Tensor] = []
        cached: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.blocks]  # of each step, [B, H, N, D]
        for _ in range(steps):
            hidden = self._mix(target, sequence, features) + positions
            for block, earlier in zip(self.blocks, cached, strict=True):
                query, key, value = block.project(hidden)
                earlier.append((key, value))
                hidden = block.finish(hidden, attend_unrolled(query, earlier, distance))
            outputs.append(self.final_norm(hidden))
            features = shift(hidden, 1)
        return outputs


def _sizes(modules: MusicgenModules) -> dict[str, int]:
    """Return the sizes in which a drafter and its target must agree."""
    return {
        "vocab_size": modules.vocab_size,
        "num_codebooks": modules.num_codebooks,
        "dim": modules.config.hidden_size,
        "num_layers": len(modules.decoder.layers),
    }
