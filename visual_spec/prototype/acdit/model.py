"""ACDiT: blocks of continuous tokens, each denoised by the whole transformer given the clean blocks before it.

Hu et al. 2024 (2412.07720), as released (thunlp/ACDiT). Clean and noisy tokens go through the same layers. Time and
class modulate the noisy ones only. A noisy block sees itself and the clean blocks before it; a clean block sees itself
and those before it, so its keys and values never change and are computed once.

    training     one pass over all clean tokens, then all noisy ones, under a mask: every block has a time of its own
    a level      `forward` on one noisy block; the first of a block also reads the clean block before it, and caches it

Parameter names are the official keys. One class serves the embedded sizes and the official files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from torch import Tensor, nn

from visual_spec.models.continuous.blocks import ConditionedState, Mlp, ViTAttention, embed_labels
from visual_spec.models.continuous.dpm_solver import LinearSolver, read_solver
from visual_spec.models.continuous.head import TimeEmbedding
from visual_spec.models.core.offload import check_cache_fits
from visual_spec.models.core.protocol import TokenGrid, check_labels
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, OneOf, Within, register_to_config
from visual_spec.models.next_token.llamagen_blocks import LabelEmbedding

PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "num_layers": 12, "num_heads": 12},
    "L": {"dim": 1024, "num_layers": 24, "num_heads": 16},
    "XL": {"dim": 1152, "num_layers": 28, "num_heads": 18},
    "H": {"dim": 1280, "num_layers": 32, "num_heads": 20},
}
_EPSILON = 1e-6  # of every norm
PREDICTIONS = ("epsilon", "v_prediction")  # as diffusers' schedulers call them


class ACDiTAttention(ViTAttention):
    """Self-attention whose queries and keys are normalised by head, then rotated."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(dim // heads, eps=_EPSILON),
            nn.RMSNorm(dim // heads, eps=_EPSILON),
        )

    def rotated(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [R, H, W, D] of `x [R, W, dim]`; `rotary [2, W, D]`: cosines and sines."""
        query, key, value = self.project(x)
        return _turned(self.q_norm(query), rotary), _turned(self.k_norm(key), rotary), value


def _turned(x: Tensor, rotary: Tensor) -> Tensor:
    """Numbers j and j + D/2 turn as a pair. As released, each has the angle of its own axis: this is no rotation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide.chunk(2, -1)
    return (wide * rotary[0] + torch.cat([-second, first], -1) * rotary[1]).to(x.dtype)


class ACDiTBlock(nn.Module):
    """A layer of DiT (Peebles and Xie 2023) whose modulation leaves the first tokens, the clean ones, as they are."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=_EPSILON), nn.RMSNorm(dim, eps=_EPSILON)
        self.attn, self.mlp = ACDiTAttention(dim, heads), Mlp(dim, 4 * dim, "tanh")
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(
        self,
        x: Tensor,
        clean: int,
        condition: Tensor,
        rotary: Tensor,
        mask: Tensor | None,
        held: tuple[Tensor, Tensor] | None = None,
        at: int = 0,
    ) -> Tensor:
        """`x [R, W, dim]`, the first `clean` tokens clean, then T noisy blocks, conditioned on [R, T, dim].

        Args:
            rotary: [2, W, D].
            mask: bool [W, S]; None: all see all.
            held: keys and values [R, H, L, D] of a cache, written from place `at` on, and read up to there.
        """
        each = (x.shape[1] - clean) // condition.shape[1]
        shift1, scale1, gate1, shift2, scale2, gate2 = _parts(self.adaLN_modulation(condition), 6, each)
        hidden = _changed(self.norm1(x), clean, lambda noisy: noisy * (scale1 + 1) + shift1)
        query, key, value = self.attn.rotated(hidden, rotary)
        if held is not None:
            end = at + x.shape[1]
            for whole, new in zip(held, (key, value), strict=True):
                whole[:, :, at:end] = new
            key, value = (whole[:, :, :end] for whole in held)
        hidden = self.attn.attend(query, key, value, mask)
        x = x + _changed(hidden, clean, lambda noisy: gate1 * noisy)
        hidden = self.mlp(_changed(self.norm2(x), clean, lambda noisy: noisy * (scale2 + 1) + shift2))
        return x + _changed(hidden, clean, lambda noisy: gate2 * noisy)


def _parts(modulation: Tensor, count: int, each: int) -> Sequence[Tensor]:
    """Modulations [R, T, count dim] of blocks as `count` tensors that fit their tokens, `each` a block."""
    parts = modulation.chunk(count, -1)
    return parts if modulation.shape[1] == 1 else [part.repeat_interleave(each, 1) for part in parts]


def _changed(x: Tensor, clean: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`x [R, W, dim]` whose tokens from the `clean`-th on are changed."""
    return torch.cat([x[:, :clean], change(x[:, clean:])], 1) if clean else change(x)


class ACDiTFinalLayer(nn.Module):
    """linear(norm(x) * (1 + scale) + shift)."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__()
        self.norm_final, self.linear = nn.RMSNorm(dim, eps=_EPSILON), nn.Linear(dim, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        each = x.shape[1] // condition.shape[1]
        shift, scale = _parts(self.adaLN_modulation(condition), 2, each)
        return self.linear(self.norm_final(x) * (scale + 1) + shift)


@dataclass
class ACDiTState(ConditionedState):
    """Static cache of one decode.

    Attributes:
        keys, values: [layers, R, H, L, D], by slot: of the clean blocks, then of the noisy one, which its clean keys
            and values replace.
        rotary: [2, L, D], cosines and sines of the slots.
    """

    keys: Tensor
    values: Tensor
    rotary: Tensor


class ACDiTTransformer(SavedModel):
    """Denoises a picture, or a clip, block by block. The defaults are ACDiT-XL's for pictures of 256 pixels.

    Slots count tokens in the order of decoding. Blocks of pictures are squares, in raster order, with raster order
    inside; blocks of clips are runs of the raster order of all frames. `places` says where each slot stands.

    Args:
        grid_size: tokens per side.
        token_dim: numbers of a token, d.
        block_size: tokens of a block, n. It is part of what was trained: another one is another model.
        frames: of a clip; 1: a picture.
        dim, num_layers, num_heads: width, depth and attention heads. `PRESETS` lists the official sizes.
        num_classes: of the class table, which has one row more.
        axis_shares: how a head's numbers are divided among the axes of the rotary embedding, (rows, columns), of a clip
            (frames, rows, columns).
        prediction: what the network returns: the noise, as released, or the velocity (Salimans and Ho 2022), which a
            short training learns better.

    Raises:
        ValueError: sizes that make no model: heads that do not divide the width, a block that does not divide the
            picture, shares that do not divide a head.
    """

    _repeated_blocks = ["ACDiTBlock"]
    _no_split_modules = ["ACDiTBlock"]

    places: Tensor

    @register_to_config
    def __init__(
        self,
        grid_size: Count = 32,
        token_dim: Count = 4,
        block_size: Count = 256,
        frames: Count = 1,
        dim: Count = 1152,
        num_layers: Count = 28,
        num_heads: Count = 18,
        num_classes: Count = 1000,
        axis_shares: Annotated[Sequence[int] | None, Within(1, none="(1, 1), of a clip (2, 3, 3)")] = None,
        prediction: Annotated[str, OneOf(PREDICTIONS)] = "epsilon",
    ):
        super().__init__()
        self.grid = TokenGrid(grid_size, grid_size, frames)
        self.token_dim, self.block_size = token_dim, block_size
        self.num_blocks = self.grid.num_tokens // block_size
        places = block_places(self.grid, block_size)
        self.t_embedder, self.y_embedder = TimeEmbedding(dim), LabelEmbedding(num_classes, dim)
        self.x_embedder = nn.Linear(token_dim, dim, bias=False)
        self.blocks = nn.ModuleList(ACDiTBlock(dim, num_heads) for _ in range(num_layers))
        self.final_layer = ACDiTFinalLayer(dim, token_dim)
        self.register_buffer("places", places, persistent=False)
        self.axes = rotary_axes(self.grid, dim, num_heads, axis_shares)

    def rotary(self) -> Tensor:
        """Cosines and sines [2, L, D] of the slots, float32, or float64 of a float64 model."""
        angles, places = [], torch.unravel_index(self.places, [size for size, _ in self.axes])
        dtype = torch.promote_types(self.dtype, torch.float32)
        head = 2 * sum(count for _, count in self.axes)
        for (size, count), place in zip(self.axes, places, strict=True):
            # As released: the base follows the length, and the last frequency of each axis is 1 / base.
            base = (int(8 * size / math.pi) // 100 + 1) * 100
            powers = torch.linspace(0, head, count, dtype=dtype, device=place.device) / head
            angle = place[:, None] / base**powers
            angles += [angle, angle]
        joined = torch.cat(angles, -1)
        return torch.stack([joined.cos(), joined.sin()])

    def solver(self, levels: int) -> LinearSolver:
        """DPM-Solver++ of so many levels, 1 to 999, as released: of a default configuration of DDIM's scheduler."""
        return _solver(self.config["prediction"], levels)

    # -- decoding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int) -> ACDiTState:
        """Embed the classes, labels long [B] or None, and allocate the cache; see `CausalContinuousModel.prefill`.

        `window` is not used; a call reads one block or two.
        """
        if condition is not None:
            check_labels(condition, batch_size, self.config["num_classes"])
        table = self.y_embedder.embedding_table
        classes = embed_labels(table, table.weight[-1:], condition, batch_size, guided=guided)
        heads, dim = self.config["num_heads"], self.config["dim"]
        shape = (len(self.blocks), len(classes), heads, self.grid.num_tokens, dim // heads)
        check_cache_fits(
            2 * math.prod(shape) * classes.element_size() // batch_size, batch_size, classes.device
        )
        return ACDiTState(classes, guided, classes.new_empty(shape), classes.new_empty(shape), self.rotary())

    @torch.no_grad()
    def forward(
        self, state: ACDiTState, noisy: Tensor, time: float, block: int, clean: Tensor | None = None
    ) -> Tensor:
        """The prediction [R, n, d] at a noisy block `[B, n, d]`, the `block`-th, at a time of 0 to 999.

        The keys and values of the blocks before it are in the cache but for the last one's: the first call of a block
        other than block 0 writes them, from its tokens `clean [B, n, d]`.
        """
        parts = [noisy] if clean is None else [clean, noisy]
        tokens = torch.cat([part.repeat(2, 1, 1) if state.guided else part for part in parts], 1)
        size, given = self.block_size, 0 if clean is None else self.block_size
        start, end = block * size - given, (block + 1) * size
        mask = None
        if given:
            mask = torch.ones(2 * size, end, dtype=torch.bool, device=tokens.device)
            mask[:size, -size:] = False
        times = torch.full((1,), time, device=tokens.device)
        condition = (self.t_embedder(times) + state.conditions)[:, None]  # [R, 1, dim]
        hidden = self.x_embedder(tokens.to(condition.dtype))
        for layer, keys, values in zip(self.blocks, state.keys, state.values, strict=True):
            hidden = layer(hidden, given, condition, state.rotary[:, start:end], mask, (keys, values), start)
        return self.final_layer(hidden[:, given:], condition)

    # -- training ------------------------------------------------------------------------------------------------------

    def predictions(self, clean: Tensor, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Predictions [B, L, d] at all noisy tokens, given the clean blocks before each, with gradients.

        Args:
            clean, noisy: [B, L, d], by slot.
            times: [B, blocks], of the noisy blocks.
            labels: long [B]; `num_classes` is no class.
        """
        condition = self.t_embedder(times) + self.y_embedder.embedding_table(labels)[:, None]
        seen = clean[:, : -self.block_size]  # nothing sees the last clean block
        given = seen.shape[1]
        mask = skip_causal_mask(self.num_blocks, self.block_size, clean.device)
        hidden = self.x_embedder(torch.cat([seen, noisy], 1))
        rotary = self.rotary()
        rotary = torch.cat([rotary[:, :given], rotary], 1)
        for layer in self.blocks:
            hidden = layer(hidden, given, condition, rotary, mask)
        return self.final_layer(hidden[:, given:], condition)


@functools.cache
def _solver(prediction: Any, levels: int) -> LinearSolver:
    config = DDIMScheduler(prediction_type=prediction).config
    solver = read_solver(DPMSolverMultistepScheduler.from_config(config), levels)
    assert solver is not None
    return solver


def skip_causal_mask(blocks: int, size: int, device: torch.device) -> Tensor:
    """What the clean tokens of all blocks but the last, then all noisy ones, see of both: bool [2 L - n, 2 L - n]
    (Hu et al. 2024, section 3.3).
    """
    index = torch.arange(blocks, device=device).repeat_interleave(size)
    noisy, clean = index[:, None], index[:-size]
    of_clean = torch.cat([clean <= clean[:, None], torch.zeros_like(clean[:, None] == index)], 1)
    return torch.cat([of_clean, torch.cat([clean < noisy, index == noisy], 1)])


def block_places(grid: TokenGrid, block_size: int) -> Tensor:
    """The place in raster order of each slot, long [L].

    Raises:
        ValueError: blocks that do not fill the grid.
    """
    every = torch.arange(grid.num_tokens, device="cpu")  # also of a model without weights yet
    if grid.frames > 1:
        if grid.num_tokens % block_size:
            raise ValueError(
                f"block_size={block_size} for {grid.num_tokens} tokens; pass a number that divides them."
            )
        return every
    side, edge = grid.height, math.isqrt(block_size)
    if edge**2 != block_size or side % edge:
        fitting = [str(n * n) for n in range(1, side + 1) if side % n == 0]
        raise ValueError(
            f"block_size={block_size} for a picture of {side} x {side} tokens; pass the square of a side that divides "
            f"it: {', '.join(fitting)}."
        )
    split = every.view(side // edge, edge, side // edge, edge)
    return split.transpose(1, 2).flatten()


def rotary_axes(grid: TokenGrid, dim: int, heads: int, shares: Sequence[int] | None) -> list[tuple[int, int]]:
    """Of each axis its length, and how many angles of a head it has.

    Raises:
        ValueError: heads or shares that do not divide.
    """
    sizes = (grid.frames, grid.height, grid.width) if grid.frames > 1 else (grid.height, grid.width)
    shares = ((2, 3, 3) if grid.frames > 1 else (1, 1)) if shares is None else tuple(shares)
    head = dim // heads
    if dim % heads or len(shares) != len(sizes) or head % (2 * sum(shares)):
        raise ValueError(
            f"dim={dim}, num_heads={heads} and axis_shares={shares} given; the heads must divide the width, there must "
            f"be a share for each of {len(sizes)} axes, and twice their sum must divide the {head} numbers of a head."
        )
    return [(size, head * share // (2 * sum(shares))) for size, share in zip(sizes, shares, strict=True)]
