"""FlowAR: the next map of a picture's latents by flow matching (Ren et al. 2024, arXiv 2412.15205).

A picture is its latents, averaged to sides 1, 2, 4 and so on: every map is the whole picture at its size, of any
autoencoder (section 3.2). A transformer, causal by map, gives each place of the next map a condition; the flow network
draws the whole map from them (sections 3.3 and 3.4). What a map is fed as is itself, enlarged to the grid and averaged
to the side of the next one.

The authors released weights and no code. Names, shapes and numbers here are checked against the code of DiSA
(Qinyu-Allen-Zhao/DiSA, arXiv 2505.20297), which loads those weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.kernels.rotary_write import Turns
from visual_spec.models.continuous.blocks import ConditionedState, embed_labels
from visual_spec.models.core.cache import Places, StaticCache
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded
from visual_spec.models.core.offload import check_cache_fits
from visual_spec.models.core.protocol import TokenGrid, check_heads, check_labels
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.prototype.flowar.flow_net import FlowNet, ScaleLayer, turns_of_maps

PRESETS: dict[str, dict[str, Any]] = {
    "S": {"dim": 768, "num_layers": 6, "num_heads": 12, "flow_width": 1024, "flow_depth": 2, "cross": False},
    "L": {"dim": 1024, "num_layers": 8, "num_heads": 16, "flow_width": 1024, "flow_depth": 12, "cross": True},
    "H": {
        "dim": 1536,
        "num_layers": 15,
        "num_heads": 16,
        "flow_width": 1536,
        "flow_depth": 12,
        "cross": True,
    },
}


@dataclass
class FlowARState(ConditionedState):
    """The state of one decode; `conditions` [R, n * n, dim] are of the next map.

    Attributes:
        cache: keys and values of all layers, by slot, without the last map's, which nothing reads.
        modulations: [layers, R, 1, 6 dim], of the class; the same for every map.
    """

    cache: StaticCache
    modulations: Tensor


class FlowARTransformer(SavedModel):
    """A next-map model of latents, conditioned on a class. The defaults are FlowAR-S's.

    Args:
        grid_size: places per side of the largest map.
        token_dim: numbers of a token, d.
        dim, num_heads: width and attention heads of encoder and decoder.
        num_layers: of the encoder, and as many of the decoder. `PRESETS` lists the official sizes.
        flow_width, flow_depth, cross: see `FlowNet`.
        num_classes: classes; the table has one row more, of no class.
        scales: places per side of each map, coarse to fine; None: 1, 2, 4 and so on.

    Raises:
        ValueError: heads that do not divide the width into multiples of 4, scales that do not grow from 1 to
            `grid_size`, or as in `FlowNet`.
    """

    _repeated_blocks = ["ScaleLayer"]
    _no_split_modules = ["ScaleLayer"]

    @register_to_config
    def __init__(
        self,
        grid_size: Count = 16,
        token_dim: Count = 16,
        dim: Count = 768,
        num_layers: int = 6,
        num_heads: Count = 12,
        flow_width: Count = 1024,
        flow_depth: int = 2,
        cross: bool = False,
        num_classes: Count = 1000,
        scales: Sequence[int] | None = None,
    ):
        super().__init__()
        doubled = [2**step for step in range(grid_size.bit_length())]
        self.scales = tuple(doubled if scales is None else scales)
        check_sizes(self.scales, grid_size, dim, num_heads)
        self.grid, self.token_dim, self.condition_dim = TokenGrid(grid_size, grid_size), token_dim, dim
        self.offsets = tuple(accumulate((side * side for side in self.scales), initial=0))
        total = self.offsets[-1]
        self.class_emb = nn.Embedding(num_classes + 1, dim)
        self.z_proj, self.z_proj_ln = nn.Linear(token_dim, dim), nn.RMSNorm(dim, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, total, dim))
        self.encoder_blocks = nn.ModuleList(ScaleLayer(dim, num_heads) for _ in range(num_layers))
        self.encoder_norm = nn.RMSNorm(dim, eps=1e-6)
        self.decoder_embed = nn.Linear(dim, dim)
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, total, dim))
        self.decoder_blocks = nn.ModuleList(ScaleLayer(dim, num_heads) for _ in range(num_layers))
        self.decoder_norm = nn.RMSNorm(dim, eps=1e-6)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, total, dim))
        self.flownet = FlowNet(token_dim, dim, flow_width, flow_depth, cross, grid_size)

    # -- maps ----------------------------------------------------------------------------------------------------------

    def averaged(self, latents: Tensor, side: int) -> Tensor:
        """A map [B, d, n, n] of latents [B, d, h, w]."""
        return F.interpolate(latents, (side, side), mode="area")

    def enlarged(self, map: Tensor) -> Tensor:
        """A map [B, d, n, n] at the size of the grid, [B, d, h, w]."""
        size = (self.grid.height, self.grid.width)
        return F.interpolate(map, size, mode="bicubic")

    def fed(self, map: Tensor, scale: int) -> Tensor:
        """What the next map, number `scale`, is predicted from: tokens [B, n * n, d] of the map [B, d, m, m] before."""
        return self.averaged(self.enlarged(map), self.scales[scale]).flatten(2).mT

    # -- decoding ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, condition: Tensor | None, *, batch_size: int, guided: bool) -> FlowARState:
        """Run the class, labels long [B] or None; see `FlowScaleModel.prefill`."""
        if condition is not None:
            check_labels(condition, batch_size, self.config["num_classes"])
        classes = embed_labels(self.class_emb, self._null, condition, batch_size, guided=guided)
        heads, dim, held = self.config["num_heads"], self.config["dim"], self.offsets[-2]
        shape = (len(self._layers), len(classes), heads, held, dim // heads)
        size = 2 * math.prod(shape) * classes.element_size()
        check_cache_fits(size // batch_size, batch_size, classes.device)
        cache = StaticCache.allocate(classes, shape)
        state = FlowARState(classes[:, None], guided, cache, self._modulations(classes))
        return self._advance(state, classes[:, None], 0)

    @torch.no_grad()
    def forward(self, state: FlowARState, map: Tensor, scale: int) -> Tensor:
        """Feed the map [B, d, m, m] before number `scale`; conditions [R, n * n, dim] of that one.

        Writes the cache; feeding a map of a lower number again takes the later ones back.
        """
        hidden = self.z_proj(self.fed(map.to(self.dtype), scale))
        return self._advance(state, hidden.repeat(2, 1, 1) if state.guided else hidden, scale).conditions

    def _advance(self, state: FlowARState, hidden: Tensor, scale: int) -> FlowARState:
        start, end = self.offsets[scale : scale + 2]
        slots = torch.arange(start, end, device=hidden.device)
        state.cache.at(slots.expand(len(hidden), -1), end)
        places = state.cache.places if end < self.offsets[-1] else None  # the last map is not kept
        held = [state.cache.layer(index) for index in range(len(self._layers))]
        state.conditions = self._run(
            hidden, state.modulations, slots, self._turns(hidden, scale), held, places
        )
        return state

    def _run(
        self,
        hidden: Tensor,
        modulations: Tensor,
        slots: Tensor,
        turns: Turns,
        held: Sequence[Any] | None = None,
        places: Places | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Both networks on embedded maps [R, W, dim] at slots [W]: conditions [R, W, dim]; see `FlowARAttention`."""
        depth = len(self.encoder_blocks)
        for index, layer in enumerate(self._layers):
            if index == 0:
                hidden = self.z_proj_ln(hidden + self.encoder_pos_embed_learned[:, slots])
            if index == depth:
                hidden = (
                    self.decoder_embed(self.encoder_norm(hidden)) + self.decoder_pos_embed_learned[:, slots]
                )
            hidden = layer(hidden, modulations[index], turns, mask, held and held[index], places)
        return self.decoder_norm(hidden) + self.diffusion_pos_embed_learned[:, slots]

    @property
    def _layers(self) -> list[nn.Module]:
        return [*self.encoder_blocks, *self.decoder_blocks]

    @property
    def _null(self) -> Tensor:
        return self.class_emb.weight[-1:]

    def _modulations(self, classes: Tensor) -> Tensor:
        return torch.stack([layer.ada_lin(classes)[:, None] for layer in self._layers])  # pyright: ignore

    def _turns(self, like: Tensor, *scales: int) -> Turns:
        head_dim = self.config["dim"] // self.config["num_heads"]
        return turns_of_maps([self.scales[scale] for scale in scales], self.grid.height, head_dim, like)

    # -- training ------------------------------------------------------------------------------------------------------

    def teacher_forced(
        self, maps: Sequence[Tensor], condition: Tensor | None, dropped: Tensor | None = None
    ) -> Tensor:
        """Conditions z [B, slots, dim] of all maps [B, d, n, n], coarse to fine, with gradients.

        `dropped`, bool [B]: rows whose class is replaced by the null class.
        """
        classes = embed_labels(self.class_emb, self._null, condition, len(maps[0]), dropped=dropped)
        fed = [self.fed(map, scale) for scale, map in enumerate(maps[:-1], 1)]
        hidden = torch.cat([classes[:, None], self.z_proj(torch.cat(fed, 1))], 1)
        slots = torch.arange(self.offsets[-1], device=hidden.device)
        ends = torch.tensor(self.offsets[1:], device=hidden.device)
        # All of the own map and those before.
        mask = slots < ends[torch.bucketize(slots, ends, right=True)][:, None]
        turns = self._turns(hidden, *range(len(self.scales)))
        return self._run(hidden, self._modulations(classes), slots, turns, mask=mask)


def check_sizes(scales: Sequence[int], grid_size: int, dim: int, num_heads: int) -> None:
    """Refuse sizes that make no model, see `FlowARTransformer`."""
    if scales[:1] != (1,) or scales[-1] != grid_size or list(scales) != sorted(set(scales)):
        raise ValueError(
            f"scales={tuple(scales)} on a grid of {grid_size}; pass sides that grow from 1 to {grid_size}."
        )
    check_heads(dim, num_heads, 4)


# -- official files ----------------------------------------------------------------------------------------------------

_FLOWAR = KeyLayout(
    "FlowAR",
    "FlowAR-S.pth, FlowAR-L.pth or FlowAR-H.pth",
    needed={
        "z_proj.weight": 2,
        "class_emb.weight": 2,
        "encoder_pos_embed_learned": 3,
        "flownet.input_proj.weight": 2,
    },
    dropped=(r"mask", r".*\.rope\.freqs"),  # computed
    container="model_ema",  # of a training run; the released files are the weights alone
)


def is_flowar(weights: Mapping[str, Any]) -> bool:
    """Return whether these keys are of a FlowAR."""
    return "flownet.input_proj.weight" in weights and "diffusion_pos_embed_learned" in weights


def unpack_flowar(path: Path, content: Any) -> Checkpoint | None:
    """The averaged weights in the content of a file of FlowAR; None: it holds none."""
    averaged = content.get("model_ema") if isinstance(content, Mapping) else None
    return _FLOWAR.contained(path, content) if isinstance(averaged, Mapping) and is_flowar(averaged) else None


def load_flowar_checkpoint(
    source: Given, *, num_heads: int | None = None, dtype: torch.dtype | None = None
) -> FlowARTransformer:
    """The model of a released file, for scales that double from 1.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads: of a size that is none of `PRESETS`, which cannot be read off the weights.
    """
    weights, name = _FLOWAR.read(source)
    dim, token_dim = weights["z_proj.weight"].shape
    layers = count_parts(weights, "encoder_blocks.")
    slots = weights["encoder_pos_embed_learned"].shape[1]
    side = 1
    while sum(4**step for step in range(side.bit_length())) < slots:
        side *= 2
    config = {
        "grid_size": side,
        "token_dim": token_dim,
        "dim": dim,
        "num_layers": layers,
        "num_heads": known_heads(PRESETS, dim, layers, num_heads, name),
        "flow_width": weights["flownet.input_proj.weight"].shape[0],
        "flow_depth": count_parts(weights, "flownet.res_blocks."),
        "cross": any(".crossattn." in key for key in weights),
        "num_classes": weights["class_emb.weight"].shape[0] - 1,
    }
    return loaded(FlowARTransformer, config, weights, name, what="FlowAR", dtype=dtype)
