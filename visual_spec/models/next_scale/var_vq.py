"""The multi-scale residual tokenizer of VAR (Tian et al. 2024, section 3.2, algorithms 1 and 2).

A picture is a latent map, and its tokens are maps of growing size. Each map codes what the smaller ones have left. All
of them are drawn onto one canvas of the largest size: a map's codes are enlarged, smoothed by a convolution, and added.
One class serves the embedded size and the official `vae_ch160v4096z32.pth`: module names are the official keys.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.models.core.layouts import KeyLayout, loaded, vqgan_sizes
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import Decoder, Design, Encoder, FusedAttentionBlock
from visual_spec.models.next_scale.scale_tokenizer import MultiscaleTokenizer
from visual_spec.models.next_scale.var import SCALES

_SMOOTHERS = 4
_VAR_VQ = KeyLayout(
    "tokenizer of VAR",
    "vae_ch160v4096z32.pth",
    needed={"encoder.conv_in.weight": 4, "quantize.embedding.weight": 2, "quant_conv.weight": 4},
    dropped=("quantize.ema_vocab_hit_SV",),  # a counter of the training
)


def smoother_of_scale(scale: int, num_scales: int) -> int:
    """Return which of the four convolutions smooths a scale: 0, 0, 1, 1, 1, 2, 2, 3, 3, 3 for ten scales.

    They are at 3/36, 13/36, 23/36 and 33/36 of the way from the first scale to the last, and the nearest one is used.
    Scale 2 of ten is exactly between two, where floating point decides in the official code. Here, in integers, the
    upper one wins ties, which gives the same.
    """
    steps = num_scales - 1
    distances = [abs(36 * scale - steps * (3 + 10 * place)) for place in range(_SMOOTHERS)]
    return max(range(_SMOOTHERS), key=lambda place: (-distances[place], place))


class MultiscaleVQModel(MultiscaleTokenizer):
    """Maps pictures to tokens of all scales and back.

    Tokens of a picture are `[B, L]`: the maps from coarse to fine, each in raster order, `L = sum(n * n)`. The canvas
    is a latent map `[B, D, N, N]` with N the side of the last scale; scale k is the k-th of `scales`, from 0.

    Args:
        base_channels, channel_multipliers, blocks_per_level: see `visual_spec.models.next_token.llamagen_vq.VQModel`.
        codebook_size, code_dim: number and length of the codes, which all scales share.
        scales: side of each token map, growing. Pictures are `scales[-1]` patches wide.
        norm_groups: groups of each GroupNorm. None makes the two networks local: every position is normalised
            separately and there is no attention. Tokens still depend on the whole picture, through the coarse scales.

    The defaults are the official ones of `vae_ch160v4096z32.pth` for pictures of 256 pixels.

    Raises:
        ValueError: there are fewer than two scales, or the sides are not ordered coarse to fine.
    """

    tokens_per_place = 1
    scales: tuple[int, ...]  # squares only

    @register_to_config
    def __init__(
        self,
        base_channels: int = 160,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        codebook_size: Count = 4096,
        code_dim: Count = 32,
        scales: tuple[int, ...] = SCALES[256],
        norm_groups: int | None = 32,
    ):
        super().__init__()
        if len(scales) < 2 or scales[0] < 1 or any(a > b for a, b in pairwise(scales)):
            raise ValueError(
                f"scales={tuple(scales)}; pass at least two sides of token maps from 1 up, coarse to fine."
            )
        self.scales = tuple(scales)
        self.codebook_size, self.code_dim = codebook_size, code_dim
        self.patch_size = 2 ** (len(channel_multipliers) - 1)  # pixels per side of a token of the last scale
        self.image_size = self.scales[-1] * self.patch_size
        design = Design(
            base_channels,
            tuple(channel_multipliers),
            blocks_per_level,
            code_dim,
            norm_groups,
            attention=None if norm_groups is None else FusedAttentionBlock,
        )
        self.encoder, self.decoder = Encoder(design), Decoder(design)
        codes = nn.Embedding(codebook_size, code_dim)
        nn.init.uniform_(codes.weight, -1.0 / codebook_size, 1.0 / codebook_size)
        smoothers = nn.ModuleList(nn.Conv2d(code_dim, code_dim, 3, padding=1) for _ in range(_SMOOTHERS))
        # Nested as the official keys are.
        self.quantize: Any = nn.ModuleDict(
            {"embedding": codes, "quant_resi": nn.ModuleDict({"qresi_ls": smoothers})}
        )
        self.quant_conv = nn.Conv2d(code_dim, code_dim, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(code_dim, code_dim, 3, padding=1)

    @property
    def codebook(self) -> Tensor:
        """The codes `[V, D]` by token id."""
        return self.quantize.embedding.weight

    # -- the canvas ---------------------------------------------------------------------------------------------------

    @property
    def canvas_shape(self) -> tuple[int, int, int]:
        return self.code_dim, self.scales[-1], self.scales[-1]

    def codes_of(self, tokens: Tensor, scale: int, like: Tensor) -> Tensor:
        return rearrange(self.quantize.embedding(tokens), "b (h w) d -> b d h w", h=self.scales[scale])

    @loads_weights
    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        if codes.shape[-1] != self.scales[-1]:
            codes = F.interpolate(codes, size=canvas.shape[-2:], mode="bicubic")
        smooth = self.quantize.quant_resi.qresi_ls[smoother_of_scale(scale, len(self.scales))]
        return canvas + (0.5 * codes + 0.5 * smooth(codes)).to(canvas.dtype)

    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        """Return the model's input for a scale >= 1: the canvas so far, area-averaged to its side: `[B, D, n, n]`."""
        return self._shrink(canvas, self.scales[scale])

    @loads_weights
    def decode_canvas(self, canvas: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` clamped to [-1, 1] of a canvas, complete or after its first scales only."""
        return self.decode_latents(canvas.to(self.dtype)).clamp(-1, 1)

    # -- pictures and tokens ------------------------------------------------------------------------------------------

    @loads_weights
    def encode_latents(self, images: Tensor) -> Tensor:
        return self.quant_conv(self.encoder(images))

    @loads_weights
    def decode_latents(self, canvas: Tensor) -> Tensor:
        """Return pictures `[B, 3, H, W]` in about [-1, 1] of a canvas."""
        return self.decoder(self.post_quant_conv(canvas))

    @loads_weights
    def quantise(self, latents: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Code a map `[B, D, N, N]` scale by scale.

        Returns:
            For every scale: what is left to code, `[B, D, n, n]`; its nearest codes, long `[B, n * n]`; the canvas
            including them, `[B, D, N, N]`. Gradients reach the canvases' codes and convolutions, but not the latents.
        """
        wanted, tokens = [], []
        canvases = [torch.zeros_like(latents)]
        for scale, side in enumerate(self.scales):
            wanted.append(self._shrink((latents - canvases[-1]).detach(), side))
            tokens.append(self._nearest(wanted[-1]))
            canvases.append(self.accumulate(canvases[-1], scale, tokens[-1]))
        return wanted, tokens, canvases[1:]

    def tokens_of(self, latents: Tensor) -> list[Tensor]:
        return self.quantise(latents)[1]

    def _shrink(self, canvas: Tensor, side: int) -> Tensor:
        return F.interpolate(canvas, size=(side, side), mode="area") if side < canvas.shape[-1] else canvas

    def _nearest(self, latents: Tensor) -> Tensor:
        """Return the ids `[B, n * n]` of the codes nearest to latents `[B, D, n, n]` in Euclidean distance."""
        codes = self.codebook.detach()
        # [B, n*n, V]
        closeness = rearrange(latents, "b d h w -> b (h w) d") @ codes.T - 0.5 * codes.square().sum(-1)
        return closeness.argmax(-1)


def load_var_vq_checkpoint(
    path: str | os.PathLike, *, dtype: torch.dtype | None = None, **config: object
) -> MultiscaleVQModel:
    """Return the tokenizer of an official file, `vae_ch160v4096z32.pth`. Sizes are read off the weights.

    `path`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        config: constructor arguments of `MultiscaleVQModel` that the weights do not determine, such as
            `scales=SCALES[512]` of `visual_spec.models.next_scale.var`: one file serves both picture sizes.
    """
    weights, name = _VAR_VQ.read(path)
    settings = vqgan_sizes(weights, name)
    settings["codebook_size"] = len(weights["quantize.embedding.weight"])
    settings["code_dim"] = len(weights["quant_conv.weight"])
    return loaded(MultiscaleVQModel, settings | config, weights, name, what="tokenizer of VAR", dtype=dtype)
