"""Milliseconds of the law kernels and of the samplers' chains of PyTorch ops, and the share of the memory's bandwidth.

Logits are random bfloat16 with guidance. Bytes are what must move: the logits of both rows, and for `verify` the law
written and, of the half of the drafts that is refused, the law read. The bandwidth is that of a copy on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from visual_spec.eval.speed import measure
from visual_spec.kernels.draw import draw
from visual_spec.kernels.verify import verify
from visual_spec.samplers.core.acceptance import accepted_prefix, exact_acceptance, residual
from visual_spec.samplers.core.drafts import rows_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise

FILTERS = {
    "none": TokenLaw(guidance_scale=4.0),
    "top-k": TokenLaw(guidance_scale=4.0, top_k=2000),
    "top-p": TokenLaw(guidance_scale=4.0, top_p=0.9),
    "both": TokenLaw(guidance_scale=4.0, top_k=2000, top_p=0.9),
}
OPS = ("draw", "verify")


def rows(
    vocab_size: int, window: int, batch_size: int, *, device: torch.device, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """One dict per operation and filter: `kernel_ms`, `chain_ms`, `faster`, `gb_per_s` and `share` of `bandwidth`.

    Args:
        bandwidth: bytes a second of a copy, those read and those written. Where there is no GPU the chain stands in
            for the kernel of `verify`, and `draw` is its definition.
    """
    for filters, law in FILTERS.items():
        for op in OPS:
            size, kernel, chain = _times(op, law, vocab_size, window, batch_size, device)
            rate = size / kernel * 1e3
            yield dict(
                op=op,
                filters=filters,
                vocab=vocab_size,
                window=window,
                batch=batch_size,
                kernel_ms=kernel,
                chain_ms=chain,
                faster=chain / kernel,
                gb_per_s=rate / 1e9,
                share=rate / bandwidth,
            )


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call; on a GPU the second-level cache is flushed before each."""
    if device.type != "cuda":
        return 1000 * sorted(measure.timed(run, device)[1] for _ in range(3))[1]
    from triton import testing

    found: Any = testing.do_bench(run, warmup=25, rep=100, return_mode="median")
    return found


def _times(
    op: str, law: TokenLaw, vocab_size: int, window: int, batch_size: int, device: torch.device
) -> tuple[int, float, float]:
    """The bytes, and the milliseconds of kernel and chain."""
    dtype = torch.bfloat16
    logits = 3 * torch.randn(2 * batch_size, window, vocab_size, dtype=dtype, device=device)  # [2B, W, V]
    slots = torch.arange(window, device=device).repeat(batch_size, 1)  # [B, W]
    noise = CounterNoise(torch.randint(2**62, (batch_size,)), device)
    numbers, size = law.numbers(True, vocab_size), logits.numel() * logits.element_size()
    if op == "draw":
        fast = milliseconds(lambda: draw(logits, noise.keys, slots, numbers, stream=TOKEN), device)
        slow = milliseconds(lambda: noise.categorical(law(logits, True, slots), slots, TOKEN), device)
        return size, fast, slow
    # Every other draft is the likeliest token of its law, which is kept; the rest are refused, but by chance.
    stored = law(logits, True, slots)  # [B, W, V]
    drafts = torch.where(slots % 2 == 0, stored.argmax(-1), stored.argmin(-1))
    kinds = slots.masked_fill(slots == window - 1, -1)
    noises: dict[str, Any] = dict(round=1, accept_stream=ACCEPT, residual_stream=RESIDUAL, draw_stream=TOKEN)

    def chain() -> None:
        target = law(logits, True, slots)
        probability = exact_acceptance(target[:, :-1], stored[:, :-1], drafts[:, :-1])
        kept = accepted_prefix(noise.bernoulli(probability, slots[:, :-1], ACCEPT, 1))[:, None]
        left = residual(rows_of(target, kept), rows_of(stored, kept))
        noise.categorical(left, slots.gather(1, kept), RESIDUAL, 1)
        noise.categorical(target, slots, TOKEN)

    def kernel() -> None:
        verify(logits, drafts, stored, kinds, noise.keys, slots, numbers, **noises)

    fast = milliseconds(kernel if device.type == "cuda" else chain, device)
    return size + 6 * stored.numel(), fast, milliseconds(chain, device)
