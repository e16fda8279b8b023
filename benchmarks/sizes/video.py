"""Wan 2.1 made causal, with random weights: what a chunk of frames costs by the policy of its cache.

What a chunk costs depends on sizes and on how many frames attention reads, not on what the weights are. Each policy
draws one long clip by the loop of Self-Forcing, five calls a chunk; the last chunks are timed, where bounded caches
have long been full. The full cache goes on growing, so its chunks there cost what they cost in a clip of that length.

    python -m benchmarks.sizes video [--size SIZE] [--batch 1]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from benchmarks.sizes.models import fill_at_random
from visual_spec.eval import measure
from visual_spec.eval.intervals import quantiles
from visual_spec.eval.timing import Report
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.pipelines.chunk_video import read_policy
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.core.law import TokenLaw

# Windows are Self-Forcing's 21 frames, sinks are as in the papers (`visual_spec.models.video.frame_cache`).
POLICIES = ("full", "sliding", "sink-window", "deep-forcing")


@dataclass(frozen=True)
class VideoSize:
    """Sizes of a Wan, of its latents (480 x 832 pixels are 60 x 104), and of the text."""

    layers: int
    heads: int
    head_dim: int
    inner: int
    height: int
    width: int
    channels: int = 16
    text: int = 512
    text_dim: int = 4096
    freq_dim: int = 256


SIZES = {
    "tiny": VideoSize(2, 2, 12, 48, 4, 4, 4, 3, 8, 16),
    "1.3b": VideoSize(30, 12, 128, 8960, 60, 104),
}


def wan(size: str | VideoSize, *, dtype: torch.dtype, device: torch.device) -> Any:
    """A `WanTransformer3DModel` with random weights, made on the device.

    Args:
        size: of `SIZES`, or a size of your own.
    """
    one = SIZES[size] if isinstance(size, str) else size
    with torch.device("meta"):
        model: Any = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=one.heads,
            attention_head_dim=one.head_dim,
            in_channels=one.channels,
            out_channels=one.channels,
            text_dim=one.text_dim,
            freq_dim=one.freq_dim,
            ffn_dim=one.inner,
            num_layers=one.layers,
        )
    fill_at_random(model, dtype=dtype, device=device)
    # A table that is computed: on the meta device it is not there.
    with torch.device(device):
        model.rope = type(model.rope)(one.head_dim, (1, 2, 2), model.config["rope_max_seq_len"])
    return model


def measure_chunks(
    model: Any,
    size: VideoSize,
    policies: Sequence[str] = POLICIES,
    *,
    batch_size: int,
    frames: int,
    chunks: int,
    sampler: ChunkWiseSampler | None = None,
    report: Report = lambda text: None,
) -> list[dict[str, Any]]:
    """Draw a clip of `frames` latent frames with every policy, and time its last `chunks` chunks.

    Args:
        model: of `wan`, of this size.

    Returns:
        One dict a policy: `seconds` of the timed chunks; `calls` of a chunk; `tokens_per_call`, latent frames over
        these; `ms_per_call` and `ms_per_image`, milliseconds a call and a chunk of one clip (quantiles); `speed_up`
        over the first policy; `weight_bytes` and `cache_bytes` that a call reads, `flops_per_call`;
        `floor_ms_per_call`, what these take at least, and `floor_share`; `peak_memory_bytes`.

    Raises:
        ValueError: fewer chunks than are to be timed, and as the sampler.
    """
    sampler = sampler or ChunkWiseSampler()
    chunk = sampler.config["chunk"]
    if not 1 <= chunks < frames // chunk:
        raise ValueError(
            f"chunks={chunks} of {frames} frames; pass 1 to {frames // chunk - 1}: the first one is not timed."
        )
    device, dtype = model.device, model.dtype
    bandwidth, peak = measure.copy_bandwidth(device), measure.matmul_peak(device, dtype)
    generator = torch.Generator().manual_seed(0)
    embeds = torch.randn(batch_size, size.text, size.text_dim, generator=generator).to(device, dtype)
    calls, rows = len(sampler.levels()) + 1, list[dict[str, Any]]()
    for text in policies:
        measure.reset_peak_memory(device)
        seconds, held = _timed_chunks(model, text, embeds, size, frames, sampler)
        seconds = seconds[-chunks:]
        cache = held[-2]  # what the last chunk began with
        found: dict[str, Any] = dict(
            name=text,
            window=None,
            sampler=None,
            batch_size=batch_size,
            guidance_scale=1.0,
            seconds=seconds,
            calls=calls,
            tokens_per_call=chunk / calls,
            ms_per_call=quantiles([1000 * one / calls for one in seconds]),
            ms_per_image=quantiles([1000 * one / batch_size for one in seconds]),
            weight_bytes=sum(one.numel() * one.element_size() for one in model.parameters()),
            cache_bytes=cache,
            flops_per_call=call_flops(model, size, batch_size, chunk, cache),
            peak_memory_bytes=measure.peak_memory(device),
        )
        moved = (found["weight_bytes"] + cache) / bandwidth
        found["floor_ms_per_call"] = 1000 * max(moved, found["flops_per_call"] / peak)
        found["floor_share"] = found["floor_ms_per_call"] / found["ms_per_call"]["p50"]
        rows.append(found)
        report(f"batch {batch_size}, {text}: {found['ms_per_call']['p50']:.1f} ms per call")
    for row in rows:
        row["speed_up"] = rows[0]["ms_per_call"]["p50"] / row["ms_per_call"]["p50"]
    return rows


def _timed_chunks(
    model: Any, policy: str, embeds: Tensor, size: VideoSize, frames: int, sampler: ChunkWiseSampler
) -> tuple[list[float], list[int]]:
    """Seconds of every chunk but the first, and bytes of the cache after every chunk."""
    ends: list[float] = []

    def note(index: int, piece: Tensor) -> None:
        if piece.is_cuda:
            torch.cuda.synchronize(piece.device)
        ends.append(time.perf_counter())

    causal = CausalWan(model, read_policy(policy))
    try:
        trace: Any = sampler(
            causal,
            embeds,
            law=TokenLaw(),
            generator=torch.Generator().manual_seed(0),
            batch_size=len(embeds),
            callback=note,
            num_frames=frames,
            height=size.height,
            width=size.width,
        ).trace
    finally:
        causal.release()
    return [after - before for before, after in zip(ends, ends[1:], strict=False)], trace.cache_bytes


def call_flops(model: Any, size: VideoSize, batch_size: int, chunk: int, cache_bytes: int) -> int:
    """Operations of a call: two a weight of the blocks and token, and what attention to cache, chunk and text takes.

    Keys and values of the text are counted by token of the text.
    """
    wide, each = size.heads * size.head_dim, (size.height // 2) * (size.width // 2)
    tokens = chunk * each
    # A layer holds key, value and three integers a token, and the sums of a chunk's queries in float32.
    stored = 2 * wide * next(model.parameters()).element_size() + 3 * 8
    seen = (cache_bytes // (batch_size * size.layers) - 4 * chunk * wide) // stored + tokens
    of_text = 2 * wide * wide  # the projections that read the text
    block = sum(one.numel() for one in model.blocks[0].parameters() if one.ndim == 2) - of_text
    linear = 2 * (block * tokens + of_text * size.text)
    attention = 4 * wide * tokens * (seen + size.text)
    return batch_size * size.layers * (linear + attention)
