"""A causal model of continuous tokens: a decoder with a cache, and MAR's head (Li et al. 2024, section 5.1, "causal").

It is the shape of the models that people run today (NextStep-1, VibeVoice, DiTAR): one token after the other in an
order that is fixed, raster or any other, so that a window of drafts is verified in one call. The cache is static and
written by slot, as LlamaGen's: each row of a batch advances at its own pace, and a rejected slot is simply written
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from visual_spec.models.continuous.blocks import Block, ConditionedState, embed_labels
from visual_spec.models.continuous.diffusion import DiffusionSchedule, FlowSchedule
from visual_spec.models.continuous.head import DiffusionHead
from visual_spec.models.continuous.mar import HEADS, HeadKind
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.offload import check_cache_fits
from visual_spec.models.core.protocol import TokenGrid, check_heads, check_labels
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config


@dataclass
class CausalContinuousState(ConditionedState):
    """Static cache of one decoding run; `conditions` belong to slot 0.

    Attributes:
        window: the largest number of slots that one call will score.
        cache: keys and values of S = prefix + tokens + window slots.
    """

    window: int
    cache: StaticCache

    def select(self, samples: Tensor) -> None:
        """Keep only some samples, long [N], in this order: those that are complete need no more room."""
        rows = self.rows(samples)
        self.conditions = self.conditions[rows]
        self.cache.select(rows)

    def buffers(self) -> list[Tensor]:
        """Return what calls read and write in place."""
        return self.cache.buffers()


class CausalContinuousTransformer(SavedModel):
    """A next-token model of continuous tokens on a square grid.

    Slots count tokens in the order of decoding; `places` says where on the grid they stand. What is fed at a slot is
    its token; the condition that comes out is of the next slot, whose place is an input too.

    Args:
        grid_size: tokens per side.
        token_dim: numbers of a token, d.
        dim, num_layers, num_heads: width, depth and attention heads.
        head_width, head_depth: of the head.
        num_classes: rows of the class table.
        prefix_length: positions before the first token, which hold the class.
        order: the place on the grid of each slot, a permutation; None: raster.
        head_kind: one of `visual_spec.models.continuous.mar.HEADS`.
        head_steps, eta, final_noise: how it draws a token unless a sampler sets otherwise; see `ChainSettings`.

    Raises:
        ValueError: a width that the heads do not divide, an unknown kind of head, a chain out of its range, or an
            order that is no permutation.
    """

    _repeated_blocks = ["Block"]
    _no_split_modules = ["Block"]
    places: Tensor

    stored_as = (torch.float8_e4m3fn,)  # by `python scripts/train mar --eight-bits`

    @register_to_config
    def __init__(
        self,
        grid_size: Count = 16,
        token_dim: Count = 16,
        dim: Count = 768,
        num_layers: int = 24,
        num_heads: Count = 12,
        head_width: int = 1024,
        head_depth: int = 6,
        num_classes: Count = 1000,
        prefix_length: Count = 1,
        order: Sequence[int] | None = None,
        head_kind: HeadKind = "noise",
        head_steps: int = 100,
        eta: float | None = None,
        final_noise: float = 0.0,
    ):
        super().__init__()
        check_heads(dim, num_heads)
        self.chain = ChainSettings(head_steps, eta, final_noise)
        self.grid = TokenGrid(grid_size, grid_size)
        length = self.grid.num_tokens
        if order is not None and sorted(order) != list(range(length)):
            raise ValueError(f"the order is no permutation of the places 0 to {length - 1}; name each once.")
        self.token_dim, self.prefix_length = token_dim, prefix_length
        # Learned by place, so by slot as well: a model knows one order only. Row `length` stands after the last token.
        self.class_emb = nn.Embedding(num_classes, dim)
        self.fake_latent = nn.Parameter(torch.zeros(1, dim))
        self.prefix_embed = nn.Parameter(torch.zeros(prefix_length, dim))
        self.z_proj, self.z_proj_ln = nn.Linear(token_dim, dim), nn.LayerNorm(dim, eps=1e-6)
        self.place_embed = nn.Parameter(torch.zeros(length, dim))
        self.next_place_embed = nn.Parameter(torch.zeros(length + 1, dim))
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.diffusion_pos_embed = nn.Parameter(torch.zeros(length + 1, dim))
        self.head = DiffusionHead(token_dim, dim, head_width, head_depth, HEADS[head_kind][0] * token_dim)
        places = torch.arange(length) if order is None else torch.tensor(list(order))
        self.register_buffer("places", torch.cat([places, torch.tensor([length])]), persistent=False)

    def schedule(self, num_steps: int, eta: float | None = None) -> DiffusionSchedule | FlowSchedule:
        """The chain that this model's head steers, of so many levels, where the model is; see `ChainSettings`."""
        return HEADS[self.config["head_kind"]][1](num_steps, eta=eta).to(self.device)

    # -- decoding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, condition: Tensor | None, *, batch_size: int, guided: bool, window: int
    ) -> CausalContinuousState:
        """Run the class, labels long [B] or None; see `CausalContinuousModel.prefill`."""
        if condition is not None:
            check_labels(condition, batch_size, self.config["num_classes"])
        hidden = self._prefix(
            embed_labels(self.class_emb, self.fake_latent, condition, batch_size, guided=guided)
        )  # [R, P, dim]
        heads, dim = self.config["num_heads"], self.config["dim"]
        room = self.prefix_length + self.grid.num_tokens + window
        shape = (len(self.blocks), len(hidden), heads, room, dim // heads)
        check_cache_fits(
            2 * math.prod(shape) * hidden.element_size() // batch_size, batch_size, hidden.device
        )
        state = CausalContinuousState(hidden[:, -1], guided, window, StaticCache.allocate(hidden, shape))
        at = torch.arange(self.prefix_length, device=hidden.device).expand(len(hidden), -1)
        hidden = self._run(state, hidden, at)
        state.conditions = hidden[:, -1] + self.diffusion_pos_embed[self.places[:1]]
        return state

    @torch.no_grad()
    def forward(self, state: CausalContinuousState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed tokens [B, W, d] at slots [B, W]; conditions z [R, W, dim], column w of slot `slots[b, w] + 1`.

        Writes the cache at those slots and attends to the class and to all slots up to each token's own. Slots after
        the last one are allowed, up to the window; what comes out there means nothing.
        """
        if state.guided:
            tokens, slots = tokens.repeat(2, 1, 1), slots.repeat(2, 1)
        last = self.grid.num_tokens - 1
        hidden = self._embed(tokens, slots.clamp_max(last))
        hidden = self._run(state, hidden, self.prefix_length + slots)
        return hidden + self.diffusion_pos_embed[self.places[slots.clamp_max(last) + 1]]

    def _run(self, state: CausalContinuousState, hidden: Tensor, at: Tensor) -> Tensor:
        """The layers and the norm on `hidden [R, W, dim]` at places [R, W] of the cache."""
        mask = state.cache.causal(at)[:, None]  # [R, 1, W, S]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, mask, state.cache.layer(index), state.cache.places)
        return self.norm(hidden)

    def _prefix(self, classes: Tensor) -> Tensor:
        """Return what stands before the first token, [R, P, dim]; its last position reads the place of slot 0."""
        prefix = classes[:, None] + self.prefix_embed
        first = torch.zeros_like(prefix)
        first[:, -1] = self.next_place_embed[self.places[:1]]
        return prefix + first

    def _embed(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Tokens [R, W, d] at slots [R, W] as `[R, W, dim]`, with their place and the next slot's."""
        hidden = self.z_proj_ln(self.z_proj(tokens) + self.place_embed[self.places[slots]])
        return hidden + self.next_place_embed[self.places[slots + 1]]

    # -- training ------------------------------------------------------------------------------------------------------

    def teacher_forced(
        self, tokens: Tensor, condition: Tensor | None, dropped: Tensor | None = None
    ) -> Tensor:
        """Conditions z [B, L, dim] for every slot of whole pictures `tokens [B, L, d]`, in order, with gradients.

        `dropped`, bool [B]: rows whose class is replaced by the null class.
        """
        batch_size, length = tokens.shape[:2]
        classes = embed_labels(self.class_emb, self.fake_latent, condition, batch_size, dropped=dropped)
        slots = torch.arange(length - 1, device=tokens.device).expand(batch_size, -1)
        hidden = torch.cat([self._prefix(classes), self._embed(tokens[:, :-1], slots)], 1)
        total = hidden.shape[1]
        mask = torch.ones(total, total, dtype=torch.bool, device=tokens.device).tril()[None, None]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.norm(hidden[:, self.prefix_length - 1 :]) + self.diffusion_pos_embed[self.places[:length]]
