"""MAR: a masked autoencoder over continuous tokens, and a diffusion head (Li et al. 2024, sections 3.3 and 3.4).

One class serves the embedded sizes and the official checkpoints; parameter names are the official keys. An encoder
reads the tokens that are known, after some places that hold the class; a decoder reads its output, with a learned
vector in place of each hidden token, and gives every slot the condition z from which the head draws its token.

The model is bidirectional, so nothing can be cached from call to call without changing its law, and the tokens of one
call are independent given those that were known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from visual_spec.models.continuous.blocks import Block, ConditionedState, embed_labels
from visual_spec.models.continuous.diffusion import DiffusionSchedule, FlowSchedule
from visual_spec.models.continuous.head import DiffusionHead
from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.protocol import TokenGrid, check_heads, check_labels
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, OneOf, register_to_config

PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "num_layers": 12, "num_heads": 12, "head_width": 1024, "head_depth": 6},
    "L": {"dim": 1024, "num_layers": 16, "num_heads": 16, "head_width": 1280, "head_depth": 8},
    "H": {"dim": 1280, "num_layers": 20, "num_heads": 16, "head_width": 1536, "head_depth": 12},
}

# Of each kind of head: how many numbers it returns for each number of a token, and what makes its chain.
HEADS: dict[str, tuple[int, Callable[..., DiffusionSchedule | FlowSchedule]]] = {
    "noise": (2, DiffusionSchedule),  # the official one
    "velocity": (2, partial(DiffusionSchedule, velocity=True)),
    "flow": (1, FlowSchedule),
}
HeadKind = Annotated[str, OneOf(tuple(HEADS))]


# Runs a layer on x [R, W, dim] of the places long [R, W], or of all places in order, under its mask.
Layer = Callable[[Block, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass
class MARState(ConditionedState):
    """What one batch is conditioned on."""

    def select(self, samples: Tensor) -> None:
        """Keep only some samples, long [N], in this order. One that is named twice is held twice."""
        self.conditions = self.conditions[self.rows(samples)]

    def buffers(self) -> list[Tensor]:
        """Return what calls read in place."""
        return [self.conditions]


class MARTransformer(SavedModel):
    """A masked model of continuous tokens on a square grid. The defaults are MAR-B's.

    Args:
        grid_size: tokens per side.
        token_dim: numbers of a token, d.
        dim, num_heads: width and attention heads of encoder and decoder.
        num_layers: of the encoder, and as many of the decoder. `PRESETS` lists the official sizes.
        head_width, head_depth: of the diffusion head.
        num_classes: rows of the class table.
        buffer_size: places that hold the class.
        head_kind: one of `HEADS`.
        head_steps, eta, final_noise: how it draws a token unless a sampler sets otherwise; see `ChainSettings`.

    Raises:
        ValueError: a width that the heads do not divide, an unknown kind of head, or a chain out of its range.
    """

    _repeated_blocks = ["Block"]
    _no_split_modules = ["Block"]

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train mar --eight-bits`

    @register_to_config
    def __init__(
        self,
        grid_size: Count = 16,
        token_dim: Count = 16,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        head_width: int = 1024,
        head_depth: int = 6,
        num_classes: Count = 1000,
        buffer_size: int = 64,
        head_kind: HeadKind = "noise",
        head_steps: int = 100,
        eta: float | None = None,
        final_noise: float = 0.0,
    ):
        super().__init__()
        check_heads(dim, num_heads)
        self.chain = ChainSettings(head_steps, eta, final_noise)
        self.grid = TokenGrid(grid_size, grid_size)
        self.token_dim = token_dim
        places = buffer_size + self.grid.num_tokens
        self.class_emb = nn.Embedding(num_classes, dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, dim))
        self.z_proj, self.z_proj_ln = nn.Linear(token_dim, dim), nn.LayerNorm(dim, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, places, dim))
        self.encoder_blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(dim, eps=1e-6)
        self.decoder_embed = nn.Linear(dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, places, dim))
        self.decoder_blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(dim, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, self.grid.num_tokens, dim))
        outputs = HEADS[head_kind][0] * token_dim
        # Nested as the official keys are.
        self.diffloss = nn.ModuleDict({"net": DiffusionHead(token_dim, dim, head_width, head_depth, outputs)})

    @property
    def head(self) -> DiffusionHead:
        """Return what draws a token from its condition."""
        return self.diffloss["net"]  # pyright: ignore[reportReturnType]

    def schedule(self, num_steps: int, eta: float | None = None) -> DiffusionSchedule | FlowSchedule:
        """The chain that this model's head steers, of so many levels, where the model is; see `ChainSettings`."""
        return HEADS[self.config["head_kind"]][1](num_steps, eta=eta).to(self.device)

    # -- decoding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prepare(self, condition: Tensor | None, *, batch_size: int, guided: bool) -> MARState:
        """Embed the classes, labels long [B] or None; see `MaskedContinuousModel.prepare`."""
        if condition is not None:
            check_labels(condition, batch_size, self.config["num_classes"])
        return MARState(
            embed_labels(self.class_emb, self.fake_latent, condition, batch_size, guided=guided), guided
        )

    @torch.no_grad()
    def forward(
        self,
        state: MARState,
        tokens: Tensor,
        known: Tensor,
        room: int | None = None,
        layer: Layer | None = None,
    ) -> Tensor:
        """Conditions z [R, L, dim] of every slot, given the tokens that are known; of those, they mean nothing.

        Args:
            tokens: [B, L, d]; what stands at hidden slots is not read.
            known: bool [B, L]. Rows may know different numbers of tokens.
            room: the largest of these numbers, where the caller knows it; else it is read, which waits for a GPU.
            layer: runs every layer, those of the encoder first; None: the layer itself does.
        """
        if state.guided:
            tokens, known = tokens.repeat(2, 1, 1), known.repeat(2, 1)
        return self.conditions(state.conditions, tokens, known, room, layer)

    def conditions(
        self,
        classes: Tensor,
        tokens: Tensor,
        known: Tensor,
        room: int | None = None,
        layer: Layer | None = None,
    ) -> Tensor:
        """The same for embedded classes [R, dim], tokens [R, L, d] and known [R, L], with gradients."""
        run: Layer = layer or (lambda block, x, mask, _: block(x, mask))
        buffer, count = self.config["buffer_size"], known.sum(-1)  # [R]
        room = int(count.max()) if room is None else room
        # The known tokens' places, in rows of equal length; shorter rows are filled up with places nobody looks at.
        order = (~known).to(torch.uint8).argsort(dim=-1, stable=True)[:, :room]  # [R, room]
        used = torch.arange(room, device=known.device) < count[:, None]
        rows = torch.arange(len(known), device=known.device)[:, None]

        placed = torch.cat(
            [torch.arange(buffer, device=known.device).expand(len(known), -1), buffer + order], 1
        )
        # Zeros, not what stands there: nobody looks at it, but it still enters products, and 0 * nan is nan.
        read = torch.where(used[..., None], tokens[rows, order], 0.0)
        # [R, buffer + room, dim]
        hidden = torch.cat([classes[:, None].expand(-1, buffer, -1), self.z_proj(read)], 1)
        hidden = self.z_proj_ln(hidden + self.encoder_pos_embed_learned[0, placed])
        seen = torch.cat([used.new_ones(len(used), buffer), used], 1)
        mask = None if room == 0 else seen[:, None, None]  # [R, 1, 1, buffer + room]
        for block in self.encoder_blocks:
            hidden = run(block, hidden, mask, placed)  # pyright: ignore[reportArgumentType]
        hidden = self.decoder_embed(self.encoder_norm(hidden))

        hidden = torch.where(seen[..., None], hidden, self.mask_token.to(hidden.dtype))
        inputs = self.mask_token.to(hidden.dtype).repeat(len(known), buffer + known.shape[1], 1)
        hidden = torch.scatter(inputs, 1, placed[..., None].expand_as(hidden), hidden)
        hidden = hidden + self.decoder_pos_embed_learned
        for block in self.decoder_blocks:
            hidden = run(block, hidden, None, None)  # pyright: ignore[reportArgumentType]
        return self.decoder_norm(hidden)[:, buffer:] + self.diffusion_pos_embed_learned
