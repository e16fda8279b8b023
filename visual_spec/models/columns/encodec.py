"""EnCodec (Defossez et al. 2022), transformers' own class, between waves and codes, at once or as a stream.

The decoder is a convolution, an LSTM, and convolutions up to the sampling rate. The LSTM carries a state from frame to
frame; everything else looks a few frames to either side. So a stream keeps that state and those frames, and its waves
are exactly what decoding the whole clip gives: chunks need no cross-fading.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers.models.encodec.modeling_encodec import EncodecConv1d, EncodecModel

from visual_spec.models.core.offload import at_hand, decodes
from visual_spec.models.core.protocol import check_ids


def check_codec(codec: EncodecModel) -> None:
    """Refuse a codec that cuts clips into chunks, or scales or normalises them over time (the 48 kHz EnCodec)."""
    config = codec.config
    wanted = {"normalize": False, "chunk_length_s": None, "norm_type": "weight_norm"}
    others = [
        f"{name}={getattr(config, name)!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    if others:
        raise ValueError(
            f"the codec has {', '.join(others)}, so its frames depend on the clip as a whole; pass one with "
            f"{', '.join(f'{name}={value!r}' for name, value in wanted.items())}, such as MusicGen's."
        )


@torch.no_grad()
def encode_waves(codec: Any, waves: Tensor) -> Tensor:
    """Return codes, long [B, K, T], of waves [B, C, N] at the codec's rate.

    For stereo, each codebook of the left channel comes before the right channel's, as in MusicGen.

    Raises:
        ValueError: as in `check_codec`; or the waves have another shape, or are not finite.
    """
    check_codec(codec)
    if waves.ndim != 3 or waves.shape[1] not in (1, 2) or not waves.shape[2]:
        raise ValueError(f"waves of shape {tuple(waves.shape)} given; pass [B, 1 or 2, N], N at least 1.")
    if not waves.isfinite().all():
        raise ValueError("the waves hold nan or infinity; pass finite samples, in [-1, 1].")
    batch, channels, _ = waves.shape
    with at_hand(codec):
        encoded = codec.encode(
            rearrange(waves, "b c n -> (b c) 1 n").to(codec.device, codec.dtype),
            bandwidth=codec.config.target_bandwidths[-1],  # all codebooks
            return_dict=True,
        ).audio_codes[0]  # [B * C, K / C, T]
    return rearrange(encoded, "(b c) k t -> b (k c) t", b=batch)


def decode_codes(codec: Any, codes: Tensor, channels: int = 1) -> Tensor:
    """Return waves [B, C, T * hop] of codes, long [B, K, T]."""
    return StreamingDecoder(codec, channels)(codes, last=True)


class StreamingDecoder:
    """Decodes a clip in stretches, to the same waves as decoding it whole (up to the rounding of sums).

    The output lags `delay` frames until the last stretch.

    Args:
        codec: an `EncodecModel`.
        channels: 2 for codes of stereo, see `encode_waves`.

    Raises:
        ValueError: as in `check_codec`; or the number of channels is neither 1 nor 2.
    """

    def __init__(self, codec: Any, channels: int = 1) -> None:
        check_codec(codec)
        if channels not in (1, 2):
            raise ValueError(f"channels={channels!r}; pass 1 or 2.")
        self.codec, self.channels = codec, channels
        first, lstm, *others = codec.decoder.layers
        self.first, self.others = _Local([first]), _Local(others)
        self.lstm = lstm.lstm
        self.state: tuple[Tensor, Tensor] | None = None
        self.batch: int | None = None
        self.ended = False

    @property
    def delay(self) -> int:
        """Number of frames that the decoder looks ahead."""
        return self.first.radius + self.others.radius

    @decodes
    def __call__(self, codes: Tensor, *, last: bool = False) -> Tensor:
        """Decode further codes, long [B, K, n]; n may be 0 in a last call that is not the first.

        Args:
            last: no codes follow; the waves are completed.

        Returns:
            [B, C, m], the waves that are final now; the first call starts at the clip's beginning.

        Raises:
            ValueError: the codes have another shape than before, exceed the codebook, or come after the last ones.
        """
        codes = self._checked(codes, last)
        latents = self.codec.quantizer.decode(codes.transpose(0, 1)).to(self.codec.dtype)  # [B * C, D, n]
        hidden = self.first(latents, last)
        if hidden is not None:
            steps = rearrange(hidden, "r d t -> t r d")
            output, self.state = self.lstm(steps, self.state)
            hidden = self.others(rearrange(output + steps, "t r d -> r d t"), last)
        elif last and self.others.kept is not None:
            hidden = self.others(self.others.kept[..., :0], last)
        if hidden is None:
            return latents.new_zeros(len(codes) // self.channels, self.channels, 0)
        return hidden.view(-1, self.channels, hidden.shape[-1])

    def _checked(self, codes: Tensor, last: bool) -> Tensor:
        """Return the codes of single channels, [B * C, K / C, n]."""
        books = len(self.codec.quantizer.layers)
        if self.ended:
            raise ValueError("the clip has ended; make another StreamingDecoder for the next one.")
        ends = last and self.batch is not None
        if codes.ndim != 3 or codes.shape[1] != books * self.channels or not (codes.shape[2] or ends):
            raise ValueError(
                f"codes of shape {tuple(codes.shape)} given; this codec takes [B, {books * self.channels}, n], "
                "n at least 1."
            )
        if self.batch not in (None, len(codes)):
            raise ValueError(f"a batch of {len(codes)} given after one of {self.batch}; pass the same clips.")
        check_ids("codes", codes, self.codec.config.codebook_size)
        self.batch, self.ended = len(codes), last
        return rearrange(codes.to(self.codec.device), "b (k c) n -> (b c) k n", c=self.channels)


class _Local:
    """Layers that look `radius` frames to either side, run over a stream."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers
        self.radius, self.hop = _extent(layers)
        self.kept: Tensor | None = None  # frames from `start` on
        self.start = self.done = 0

    def __call__(self, frames: Tensor, last: bool) -> Tensor | None:
        """The output for frames [R, C, n] and those kept from before, as far as later frames cannot change it."""
        kept = frames if self.kept is None else torch.cat([self.kept, frames], -1)
        end = self.start + kept.shape[-1]
        until = end if last else end - self.radius
        self.kept = kept
        if until <= self.done:
            return None
        output = kept
        for layer in self.layers:
            output = layer(output)
        # The padding of the cut edges affects at most `radius` frames.
        output = output[..., (self.done - self.start) * self.hop : (until - self.start) * self.hop]
        start = max(0, until - self.radius)
        self.kept, self.start, self.done = kept[..., start - self.start :], start, until
        return output


def _extent(layers: list[nn.Module]) -> tuple[int, int]:
    """Return how many frames the layers look to either side at most, and the samples that they make of a frame."""
    radius, hop = 0.0, 1
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, nn.ConvTranspose1d):
                radius += module.kernel_size[0] / module.stride[0] / hop
                hop *= module.stride[0]
            elif isinstance(module, EncodecConv1d):
                conv: Any = module.conv
                span = (conv.kernel_size[0] - 1) * conv.dilation[0]
                radius += (span if module.causal else (span + 1) // 2) / hop
    return math.ceil(radius), hop
