"""MAGE: a masked encoder and decoder that draws pictures without a condition (Li et al., CVPR 2023).

One class serves any size of the official layout; parameter names are the official keys. An encoder reads all tokens,
with the mask id where they are hidden. A decoder reads its output, with the output at the class place in place of each
hidden token. In training the encoder also leaves out hidden tokens; generation shows it all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.continuous.blocks import Block
from visual_spec.models.core.cache import StaticCache
from visual_spec.models.core.layouts import Given, KeyLayout, count_parts, known_heads, loaded
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import decodes, loads_weights
from visual_spec.models.core.protocol import TokenGrid, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config

PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "num_layers": 12, "num_heads": 12, "decoder_dim": 768},
    "L": {"dim": 1024, "num_layers": 24, "num_heads": 16, "decoder_dim": 1024},
}

# Keys of official files that generation does not read: the tokenizer, which is a model of its own, and parts of the
# vision transformer from which the code grew.
_MAGE = KeyLayout(
    "MAGE",
    "a file such as mage-vitb-1600.pth",
    needed={"token_emb.word_embeddings.weight": 2, "decoder_embed.weight": 2, "decoder_pos_embed_learned": 3},
    dropped=(  # generation does not read these
        r"(vqgan|patch_embed|decoder_pred)\..*",
        "cls_token|pos_embed|mask_token|decoder_pos_embed",
    ),
)


@dataclass
class MageState(MaskedState):
    """One batch; the model draws without a condition.

    Attributes:
        held: keys and values of the last call that kept them, in encoder and decoder: of the class place, of all slots,
            and scratch places.
        features: [B, L, decoder_dim], what that call had before the head.
    """

    fixed: ClassVar[bool] = True

    held: tuple[StaticCache, StaticCache] | None = None
    features: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        for cache in self.held or ():
            cache.select(samples)
        if self.features is not None:
            self.features = self.features[samples]


class TokenEmbeddings(nn.Module):
    """Embeddings of tokens and places, summed and normalised."""

    def __init__(self, rows: int, places: int, dim: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(rows, dim)
        self.position_embeddings = nn.Embedding(places, dim)
        self.LayerNorm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """[B, W, dim] of ids at places, both long [B, W]."""
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(places))


class TokenHead(nn.Module):
    """Scores all rows of the embedding table."""

    def __init__(self, decoder_dim: int, dim: int, rows: int):
        super().__init__()
        self.fc = nn.Linear(decoder_dim, dim)
        self.ln = nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(1, 1, rows))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Scores of the first V of `table [V, dim]`."""
        return F.linear(self.ln(F.gelu(self.fc(x))), table, self.bias[0, 0, : len(table)])


class MageTransformer(SavedModel):
    """A `MaskedModel` over a square grid of image tokens, without a condition. The defaults are MAGE-B's.

    Args:
        vocab_size: number of image codes. The table also has a row for each of `num_classes` classes of a past design,
            and one for the mask, the last.
        dim, num_layers, num_heads: of the encoder. `PRESETS` lists the official sizes.
        decoder_dim, decoder_layers, decoder_heads: of the decoder.
        grid_size: tokens per side.
        class_id: the row of the table that stands in the class place.

    Raises:
        ValueError: heads that do not divide a width, or a row that is not in the table.
    """

    _repeated_blocks = ["Block"]
    _no_split_modules = ["Block"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 1024,
        dim: Count = 768,
        num_layers: int = 12,
        num_heads: Count = 12,
        decoder_dim: int = 768,
        decoder_layers: int = 8,
        decoder_heads: int = 16,
        grid_size: Count = 16,
        num_classes: Count = 1000,
        class_id: int = 1100,
    ):
        super().__init__()
        if dim % num_heads or decoder_dim % decoder_heads:
            raise ValueError(
                f"dim={dim}, num_heads={num_heads}, decoder_dim={decoder_dim} and decoder_heads={decoder_heads} given; "
                "heads must divide their width."
            )
        rows = vocab_size + num_classes + 1
        if not vocab_size <= class_id < rows - 1:
            raise ValueError(f"class_id={class_id}; pass a row from {vocab_size} to {rows - 2}.")
        self.grid, self.vocab_size, self.mask_id = TokenGrid(grid_size, grid_size), vocab_size, rows - 1
        self.feature_dim, places = decoder_dim, 1 + self.grid.num_tokens
        self.token_emb = TokenEmbeddings(rows, places, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, places, decoder_dim))
        self.decoder_blocks = nn.ModuleList(Block(decoder_dim, decoder_heads) for _ in range(decoder_layers))
        self.decoder_norm = nn.LayerNorm(decoder_dim, eps=1e-6)
        self.mlm_layer = TokenHead(decoder_dim, dim, rows)

    def prepare(self, condition: None, *, batch_size: int, guided: bool) -> MageState:
        """See `MaskedModel`. The model draws without a condition and without guidance."""
        if condition is not None or guided:
            raise ValueError(
                f"{'a condition' if condition is not None else 'guidance'} given, but MAGE draws pictures of no class; "
                "pass condition=None and guidance_scale=1."
            )
        return MageState(guided=False, device=self.token_emb.word_embeddings.weight.device)

    @decodes
    def forward(
        self,
        state: MageState,
        tokens: Tensor,
        stage: int = 0,
        *,
        keep: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, L, V]` of every slot, given `tokens [B, L, 1]` with the mask id where they are hidden.

        `keep` and `places` are as in `ReusingMaskedModel`. The class place is computed in every call, because it
        stands for the hidden tokens.
        """
        ids = F.pad(tokens[..., 0], (1, 0), value=self.config["class_id"])  # [B, 1 + L]
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if places is None and keep is None:
            return self.scores(state, self._features(ids, at))
        if places is None:
            assert keep is not None
            size = ids.shape[1] + keep
            if state.held is None or state.held[0].num_slots != size:
                state.held = self._room(len(ids), size)
            written = at
        else:
            if state.held is None:
                raise ValueError("places given, but nothing is held; call the model with keep=n first.")
            written = F.pad(places + 1, (1, 0))  # the class place is the first
            at = written.clamp(max=ids.shape[1] - 1)
        for cache in state.held:
            cache.at(written, ids.shape[1])
        features = self._features(ids.gather(1, at), at, state.held)
        if places is None:
            state.features = features
        return self.scores(state, features)

    @loads_weights
    def scores(self, state: MageState, features: Tensor, stage: int = 0) -> Tensor:
        """Logits `[B, W, V]` of features `[B, W, decoder_dim]`."""
        table = self.token_emb.word_embeddings.weight[: self.vocab_size]
        return wide(self.mlm_layer(features, table))

    def _features(
        self, ids: Tensor, at: Tensor, held: tuple[StaticCache, StaticCache] | None = None
    ) -> Tensor:
        """Features `[B, W, decoder_dim]` of ids at places, both long [B, 1 + W], of which the class comes first."""
        encoding, decoding = (None, None) if held is None else held
        hidden = _through(self.blocks, self.token_emb(ids, at), encoding)
        hidden = self.decoder_embed(self.norm(hidden))
        hidden = torch.where((ids == self.mask_id)[..., None], hidden[:, :1], hidden)
        hidden = hidden + self.decoder_pos_embed_learned[0, at]
        return self.decoder_norm(_through(self.decoder_blocks, hidden, decoding)[:, 1:])

    def _room(self, rows: int, size: int) -> tuple[StaticCache, StaticCache]:
        """Empty caches of so many places, of the encoder and of the decoder."""
        sizes = []
        for blocks, dim, heads in (
            (self.blocks, self.config["dim"], self.config["num_heads"]),
            (self.decoder_blocks, self.config["decoder_dim"], self.config["decoder_heads"]),
        ):
            shape = (len(blocks), rows, heads, size, dim // heads)
            sizes.append(StaticCache.allocate(self.decoder_pos_embed_learned, shape))
        return sizes[0], sizes[1]


def _through(blocks: nn.ModuleList, hidden: Tensor, cache: StaticCache | None) -> Tensor:
    """`hidden [B, W, dim]` after the layers; with a cache, places also see what it holds of the others."""
    for index, block in enumerate(blocks):
        if cache is None:
            hidden = block(hidden)
        else:
            hidden = block(hidden, None, cache.layer(index), cache.places)
    return hidden


def load_mage_checkpoint(
    source: Given,
    *,
    num_heads: int | None = None,
    decoder_heads: int = 16,
    class_id: int = 1100,
    num_classes: int = 1000,
    dtype: torch.dtype | None = None,
) -> MageTransformer:
    """The model of an official file, such as `mage-vitb-1600.pth`.

    Weights that generation does not read are dropped, the tokenizer's (`vqgan.*`) among them.
    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        num_heads: of a size that is none of `PRESETS`; like the three after it, it cannot be read off the weights.
    """
    weights, name = _MAGE.read(source)
    table, decoder = weights["token_emb.word_embeddings.weight"], weights["decoder_embed.weight"]
    places = weights["decoder_pos_embed_learned"]
    dim, layers = table.shape[1], count_parts(weights, "blocks.")
    config = dict(
        vocab_size=len(table) - num_classes - 1,
        dim=dim,
        num_layers=layers,
        num_heads=known_heads(PRESETS, dim, layers, num_heads, name),
        decoder_dim=decoder.shape[0],
        decoder_layers=count_parts(weights, "decoder_blocks."),
        decoder_heads=decoder_heads,
        grid_size=round((places.shape[1] - 1) ** 0.5),
        num_classes=num_classes,
        class_id=class_id,
    )
    return loaded(
        MageTransformer,
        config,
        weights,
        name,
        what="MAGE",
        constants=lambda _: {"token_emb.position_ids": torch.arange(places.shape[1])[None]},
        dtype=dtype,
    )
