"""MaskGCT's codecs: of acoustic codes (encoder, quantiser, Vocos), and of semantic ones (Wang et al., ICLR 2025).

Acoustic codes are of 24 kHz waves, 50 frames a second: an encoder of convolutions (DAC's, Kumar et al.
2023), residual codebooks in few dimensions, and a decoder that predicts a spectrum for each frame (Vocos, Siuzdak
2023). Semantic codes are one codebook over features of a speech model, w2v-BERT 2.0's layer 17, normalised by the mean
and deviation of its training data.

Parameter names are the official keys, except that the encoder is transformers' `DacEncoder` and that weight norms are
folded; `maskgct_checkpoint` reads official files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DacConfig
from transformers.models.dac.modeling_dac import DacEncoder

from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config

_LOUDEST = 100.0  # most of a magnitude of a spectrum


class Codebook(nn.Module):
    """Codes in few dimensions, compared by their direction (factorised and normalised, as in DAC)."""

    def __init__(self, dim: int, codes: int, code_dim: int):
        super().__init__()
        self.in_project, self.out_project = nn.Conv1d(dim, code_dim, 1), nn.Conv1d(code_dim, dim, 1)
        self.codebook = nn.Embedding(codes, code_dim)

    def encode(self, x: Tensor) -> Tensor:
        """Codes long [B, T] of `x [B, dim, T]`."""
        directions = F.normalize(self.in_project(x).transpose(1, 2), dim=-1)
        return (directions @ F.normalize(self.codebook.weight, dim=-1).t()).argmax(-1)

    def decode(self, codes: Tensor) -> Tensor:
        """[B, dim, T] of codes long [B, T]."""
        return self.out_project(self.codebook(codes).transpose(1, 2))


class ResidualCodebooks(nn.Module):
    """Codebooks, each of what the ones before it left."""

    def __init__(self, dim: int, books: int, codes: int, code_dim: int):
        super().__init__()
        self.quantizers = nn.ModuleList(Codebook(dim, codes, code_dim) for _ in range(books))

    def encode(self, x: Tensor) -> Tensor:
        """Codes long [B, K, T] of `x [B, dim, T]`."""
        codes, left = [], x
        for book in self.quantizers:
            codes.append(book.encode(left))  # pyright: ignore[reportCallIssue]
            left = left - book.decode(codes[-1])  # pyright: ignore[reportCallIssue]
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """[B, dim, T] of codes long [B, K, T]."""
        parts = [book.decode(own) for book, own in zip(self.quantizers, codes.unbind(1), strict=True)]  # pyright: ignore
        return torch.stack(parts).sum(0)


class ConvNeXtBlock(nn.Module):
    """A wide convolution of each channel, and two layers over the channels."""

    def __init__(self, dim: int, hidden: int, gain: float):
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma = nn.Parameter(torch.full((dim,), gain))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.dwconv(x).transpose(1, 2))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(inner)))).transpose(1, 2)


class VocosBackbone(nn.Module):
    """Features [B, T, dim] of `x [B, channels, T]`."""

    def __init__(self, channels: int, dim: int, hidden: int, layers: int):
        super().__init__()
        self.embed = nn.Conv1d(channels, dim, 7, padding=3)
        self.norm, self.final_layer_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.convnext = nn.ModuleList(ConvNeXtBlock(dim, hidden, 1 / layers) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2)
        for block in self.convnext:
            x = block(x)
        return self.final_layer_norm(x.transpose(1, 2))


class SpectrumHead(nn.Module):
    """Waves of features: a magnitude and a phase for each frequency of a frame, and overlapping frames added up."""

    def __init__(self, dim: int, frame: int, hop: int):
        super().__init__()
        self.frame, self.hop = frame, hop
        self.out = nn.Linear(dim, frame + 2)

    def forward(self, x: Tensor) -> Tensor:
        """Waves [B, 1, T * hop] of features [B, T, dim]."""
        spectrum = self.out(x).transpose(1, 2)
        spectrum = wide(spectrum)
        magnitude, phase = spectrum.chunk(2, 1)
        window = torch.hann_window(self.frame, dtype=spectrum.dtype, device=x.device)
        pieces = torch.fft.irfft(torch.polar(magnitude.exp().clamp(max=_LOUDEST), phase), self.frame, dim=1)
        added = self._added(pieces * window[:, None])
        weight = self._added(window.square()[None, :, None].expand(1, -1, x.shape[1]))
        return (added / weight).to(x.dtype)

    def _added(self, pieces: Tensor) -> Tensor:
        """Add up pieces [B, frame, T], each `hop` after the one before, and cut off what a frame has too much."""
        size = (pieces.shape[2] - 1) * self.hop + self.frame
        whole = F.fold(pieces, (1, size), (1, self.frame), stride=(1, self.hop))[:, :, 0]  # [B, 1, size]
        extra = (self.frame - self.hop) // 2
        return whole[..., extra : size - extra]


class Vocos(nn.Module):
    """Waves [B, 1, T * hop] of `x [B, channels, T]`."""

    def __init__(self, channels: int, dim: int, hidden: int, layers: int, frame: int, hop: int):
        super().__init__()
        self.backbone = VocosBackbone(channels, dim, hidden, layers)
        self.head = SpectrumHead(dim, frame, hop)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class AcousticCodec(SavedModel):
    """Waves to acoustic codes and back. The defaults are the official ones.

    Args:
        codebooks, vocab_size, code_dim: number of codebooks, of codes in each, and of dimensions of a code.
        latent_dim: channels between encoder and decoder.
        encoder_dim, strides: of the encoder; a frame is the product of the strides.
        vocos_dim, vocos_hidden, vocos_layers: of the decoder.
        frame_size: samples of a spectrum.
        sampling_rate: in Hz.

    Raises:
        ValueError: a spectrum shorter than a frame, or an odd difference of both.
    """

    @register_to_config
    def __init__(
        self,
        codebooks: Count = 12,
        vocab_size: Count = 1024,
        code_dim: Count = 8,
        latent_dim: int = 256,
        encoder_dim: int = 96,
        strides: Sequence[int] = (3, 4, 5, 8),
        vocos_dim: int = 512,
        vocos_hidden: int = 4096,
        vocos_layers: int = 30,
        frame_size: int = 1920,
        sampling_rate: int = 24_000,
    ):
        super().__init__()
        hop = math.prod(strides)
        if frame_size < hop or (frame_size - hop) % 2:
            raise ValueError(
                f"frame_size={frame_size} with frames of {hop} samples given; pass an even number more than {hop}."
            )
        self.samples_per_frame = hop
        encoder = DacConfig(encoder_hidden_size=encoder_dim, downsampling_ratios=list(strides))
        encoder.hidden_size = latent_dim  # the configuration derives another one
        self.encoder = DacEncoder(encoder)
        self.quantizer = ResidualCodebooks(latent_dim, codebooks, vocab_size, code_dim)
        self.model = Vocos(latent_dim, vocos_dim, vocos_hidden, vocos_layers, frame_size, hop)

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.config["sampling_rate"] / self.samples_per_frame

    @decodes
    def encode(self, waves: Tensor) -> Tensor:
        """Return codes long [B, K, T] of waves [B, 1, N]."""
        return self.quantizer.encode(self.encoder(waves.to(self.dtype)))

    @decodes
    def decode(self, codes: Tensor) -> Tensor:
        """Return waves [B, 1, T * samples_per_frame] of codes long [B, K, T]."""
        return self.model(self.quantizer.decode(codes))


class SemanticCodec(SavedModel):
    """Features of a speech model to semantic codes. The defaults are the official ones.

    Args:
        vocab_size, code_dim: codes, and dimensions of each.
        feature_dim: of the features.
        feature_layer: the layer of the speech model that they are taken from.
        vocos_dim, vocos_hidden, vocos_layers: of the encoder.
    """

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 8192,
        code_dim: Count = 8,
        feature_dim: int = 1024,
        feature_layer: int = 17,
        vocos_dim: int = 384,
        vocos_hidden: int = 2048,
        vocos_layers: int = 12,
    ):
        super().__init__()
        self.mean, self.deviation = (nn.Parameter(torch.full((feature_dim,), value)) for value in (0.0, 1.0))
        self.encoder = nn.Sequential(
            VocosBackbone(feature_dim, vocos_dim, vocos_hidden, vocos_layers),
            nn.Linear(vocos_dim, feature_dim),
        )
        self.quantizer = ResidualCodebooks(feature_dim, 1, vocab_size, code_dim)

    @decodes
    def encode(self, features: Tensor) -> Tensor:
        """Return codes long [B, T] of features [B, T, feature_dim]."""
        scaled = (features.to(self.dtype) - self.mean) / self.deviation
        return self.quantizer.encode(self.encoder(scaled.transpose(1, 2)).transpose(1, 2))[:, 0]
