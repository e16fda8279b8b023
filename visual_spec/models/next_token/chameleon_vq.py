"""The picture decoder of Chameleon, Anole and Lumina-mGPT, which is VQGAN's (Esser et al. 2021). transformers lacks it.

Parameters are named as in the official `vqgan.ckpt`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import torch
from einops import rearrange
from safetensors import safe_open
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import bare_key, fill, read_checkpoint
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.vq_blocks import AttentionBlock, Decoder, Design

_PARTS = ("decoder.", "post_quant_conv.", "quantize.embedding.")


class ChameleonVQDecoder(SavedModel):
    """Maps codes to pictures.

    Args:
        base_channels, channel_multipliers, blocks_per_level, latent_channels, codebook_size, codebook_dim: as in
            transformers' `ChameleonVQVAEConfig` (there base_channels, channel_multiplier, num_res_blocks,
            latent_channels, num_embeddings, embed_dim). The defaults are the official ones.
        norm_groups: groups of each GroupNorm.
    """

    @register_to_config
    def __init__(
        self,
        base_channels: int = 128,
        channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4),
        blocks_per_level: int = 2,
        latent_channels: int = 256,
        codebook_size: Count = 8192,
        codebook_dim: int = 256,
        norm_groups: int = 32,
    ) -> None:
        super().__init__()
        sizes = base_channels, tuple(channel_multipliers), blocks_per_level, latent_channels, norm_groups
        self.decoder = Decoder(Design(*sizes, attention=AttentionBlock, level_attention=False))
        self.post_quant_conv = nn.Conv2d(codebook_dim, latent_channels, 1)
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(codebook_size, codebook_dim)})

    @classmethod
    def from_file(cls, path: str | os.PathLike, config: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Read the decoder from an official file.

        Args:
            path: `vqgan.ckpt`, a `.safetensors` file, or a folder of them (an Anole checkpoint that holds
                `model.vqmodel.decoder.*`). Other tensors in it are ignored.
            config: the `vq_config` of the transformers model; None is the official size.
            dtype: dtype of the weights; None keeps the file's.

        Raises:
            FileNotFoundError: there is no such file, or the folder has no safetensors.
            ValueError: the file is not a plain state dict, or lacks tensors of the decoder; the message lists them.
        """
        sizes = {}
        if config is not None:
            sizes = dict(
                base_channels=config.base_channels,
                channel_multipliers=tuple(config.channel_multiplier),
                blocks_per_level=config.num_res_blocks,
                latent_channels=config.latent_channels,
                codebook_size=config.num_embeddings,
                codebook_dim=config.embed_dim,
            )
        with torch.device("meta"):
            model = cls(**sizes)
        return fill(model, decoder_weights(path), str(path), what="a decoder of this size", dtype=dtype)

    @decodes
    def decode_codes(self, codes: Tensor) -> Tensor:
        """Return pictures [B, 3, h * f, w * f] in [-1, 1] of codes, long [B, h, w]; f is 16 in the official network."""
        latents = rearrange(self.quantize["embedding"](codes.to(self.device)), "b h w d -> b d h w")
        return self.decoder(self.post_quant_conv(latents)).clamp(-1, 1)


def decoder_weights(path: str | os.PathLike) -> dict[str, Tensor]:
    """Return the decoder's tensors in a file or folder, under their official names.

    Raises:
        FileNotFoundError, ValueError: as `ChameleonVQDecoder.from_file`.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"{path} is no file, and no folder with .safetensors files.")
    official: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            # One file at a time: beside the decoder such files hold a language model.
            with safe_open(file, framework="pt") as tensors:
                held = {key: tensors.get_tensor(key) for key in tensors.keys() if _official(key)}  # noqa: SIM118
        else:
            held = read_checkpoint(file).weights
        official |= {name: value for key, value in held.items() if (name := _official(key)) is not None}
    return official


def _official(key: str) -> str | None:
    name = bare_key(key).removeprefix("module.").removeprefix("model.").removeprefix("vqmodel.")
    return name if name.startswith(_PARTS) else None
