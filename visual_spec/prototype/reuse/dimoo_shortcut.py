"""MIGM-Shortcut's network for Lumina-DiMOO (2602.23996), and its official file. Parameter names are the official keys.

Two of Lumina-DiMOO's layers at half its width: the first sees the tokens that were kept since the last call, and the
prompt where the row has one; the second sees all places. The hidden share modulates what they return.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.core.layouts import Given, KeyLayout, loaded
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.masked.dimoo import DimooLayer, DimooState, DimooTransformer, turns_of
from visual_spec.models.next_token.llamagen_blocks import RMSNorm

_SHORTCUT = KeyLayout(
    "shortcut of Lumina-DiMOO",
    "dimoo-shortcut.pth of Kaiwen-Zhu/MIGM-Shortcut",
    needed={
        "new_token_proj_in.weight": 2,
        "time_embedder.mlp.0.weight": 2,
        "blocks.0.cross_attn.up_proj.weight": 2,
    },
)


class DimooShortcut(SavedModel):
    """Stands in for a `DimooTransformer` on some calls; see `ReusingMaskedSampler`. The defaults are the official ones.

    Args:
        feature_dim: width of the model.
        dim, num_heads, hidden: of the layers; `hidden` is the model's.
        share_dim, share_hidden: of the sinusoids of the hidden share, and of the layer that reads them.
        rotary_base: of the positions; the model's.

    Raises:
        ValueError: a width that is no multiple of twice the heads.
    """

    @register_to_config
    def __init__(
        self,
        feature_dim: Count = 4096,
        dim: Count = 2048,
        num_heads: Count = 32,
        hidden: Count = 12288,
        share_dim: Count = 256,
        share_hidden: Count = 724,
        rotary_base: float = 500000.0,
    ):
        super().__init__()
        self.proj_in, self.new_token_proj_in = nn.Linear(feature_dim, dim), nn.Linear(feature_dim, dim)
        layers = {name: DimooLayer(dim, num_heads, hidden) for name in ("cross_attn", "self_attn")}
        self.blocks = nn.ModuleList([nn.ModuleDict(layers)])
        self.ln_f = RMSNorm(dim, 1e-5)
        sizes = nn.Linear(share_dim, share_hidden), nn.SiLU(), nn.Linear(share_hidden, dim)
        self.time_embedder = nn.ModuleDict({"mlp": nn.Sequential(*sizes)})
        self.adaLN_modulation = nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, feature_dim)

    def check_fits(self, model: Any) -> None:
        """Refuse a model of another kind, width or positions than this network was made for, by ValueError."""
        own = self.config["feature_dim"], self.config["rotary_base"]
        kind = isinstance(model, DimooTransformer)
        if not kind or own != (model.config["dim"], model.config["rotary_base"]):
            said = (model.config["dim"], model.config["rotary_base"]) if kind else type(model).__name__
            raise ValueError(
                f"the shortcut is for a Lumina-DiMOO of width and base {own}, and the model is {said}; pass one that "
                "was trained for it."
            )

    def follow(
        self, model: DimooTransformer, state: DimooState, tokens: Tensor, newest: Tensor, share: Tensor
    ) -> Tensor:
        """Features `[R, S, C]` of the next call of a model, from its state after the last one.

        Args:
            tokens, newest: long and bool [R, L], as of `FeatureShortcut.forward`.
            share: [R], the hidden share that is left.
        """
        assert state.features is not None
        size, count = len(state.frame), len(tokens) // (2 if state.guided else 1)
        seen = torch.zeros(state.features.shape[:2], dtype=torch.bool, device=tokens.device)
        seen[:, state.slots] = newest
        words = torch.arange(seen.shape[1] - size, device=tokens.device) < state.lengths[:, None]
        seen[:count, size:] = words[:count]  # rows without a condition see no prompt
        embedded = model.embed(state, tokens)
        return self(state.features, embedded, seen, state.seen, state.places, share)

    @loads_weights
    def forward(
        self,
        features: Tensor,
        embedded: Tensor,
        newest: Tensor,
        seen: Tensor | None,
        at: Tensor,
        share: Tensor,
    ) -> Tensor:
        """Features of the next call, `[R, S, C]`.

        Args:
            features: [R, S, C], of the last call.
            embedded: [R, S, C], the model's embeddings of all places; read only where `newest`, bool [R, S].
            seen: bool [R, 1, 1, S], the places that are there; None: all.
            at: long [R, S], the position of each place.
            share: [R], the hidden share that is left.
        """
        weight, size = self.proj_in.weight, self.config["dim"] // self.config["num_heads"]
        x, new = self.proj_in(features.to(weight)), self.new_token_proj_in(embedded.to(weight))
        turns = turns_of(at, size, self.config["rotary_base"], weight.dtype)
        block: Any = self.blocks[0]
        x = block["cross_attn"](x, turns, newest[:, None, None], context=new)
        x = self.ln_f(block["self_attn"](x, turns, seen))
        half = self.config["share_dim"] // 2
        rates = torch.arange(half, device=x.device, dtype=torch.float32) * (-math.log(10000.0) / half)
        angles = 1000 * share.float()[:, None] * rates.exp()
        waves = torch.cat([angles.cos(), angles.sin()], 1).to(weight)
        scale, shift = self.adaLN_modulation(self.time_embedder["mlp"](waves))[:, None].chunk(2, -1)
        return features + self.proj_out(x * (1 + scale) + shift).to(features)


def load_dimoo_shortcut(
    source: Given, *, num_heads: int = 32, rotary_base: float = 500000.0, dtype: torch.dtype | None = None
) -> DimooShortcut:
    """The shortcut of an official file, `dimoo-shortcut.pth`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads, rotary_base: the model's, which no weight tells.
    """
    weights, name = _SHORTCUT.read(source)
    dim, feature_dim = weights["new_token_proj_in.weight"].shape
    share_hidden, share_dim = weights["time_embedder.mlp.0.weight"].shape
    config = {
        "feature_dim": feature_dim,
        "dim": dim,
        "num_heads": num_heads,
        "hidden": len(weights["blocks.0.cross_attn.up_proj.weight"]),
        "share_dim": share_dim,
        "share_hidden": share_hidden,
        "rotary_base": rotary_base,
    }
    return loaded(DimooShortcut, config, weights, name, what="shortcut of Lumina-DiMOO", dtype=dtype)
