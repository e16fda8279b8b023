"""Milliseconds of the kernels and of the chains of PyTorch ops that they replace, and the share of the bandwidth.

    python scripts/bench_kernels.py [--vocab 16384 65536] [--window 1 32 64] [--batch 1] [--out FILE]

Laws: logits are random bfloat16 with guidance. Bytes are what must move: the logits of both rows, and for `verify` the
law written and, of the half of the drafts that is refused, the law read. Layers: one of LlamaGen-XL, guided, bfloat16,
halfway through a picture of 24 x 24 tokens. Bytes are the inputs and outputs, and of the cache what the text fills. The
bandwidth is measured by a copy on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.eval import measure
from visual_spec.files.documents import json_text, write_json
from visual_spec.kernels.draw import draw, draw_reference, whole_draw_triton
from visual_spec.kernels.layers import add_norm, add_norm_reference, gated, gated_reference
from visual_spec.kernels.rotary_write import rotary_write, rotary_write_reference
from visual_spec.kernels.split_draw import split_draw_triton
from visual_spec.kernels.verify import verify
from visual_spec.kernels.window_attention import window_attention
from visual_spec.models.next_token.llamagen_blocks import turns_of
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
# The two ways of `draw`: one program a slot, and several. Which one it takes is decided in `kernels.split_draw`.
DRAWS = {"draw, one program a slot": whole_draw_triton, "draw, split": split_draw_triton}
# Width, hidden width, heads, positions of the prompt, and tokens of a picture.
XL = (1280, 3584, 20, 120, 576)


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
            times = _times(op, law, vocab_size, window, batch_size, device)
            what = dict(op=op, filters=filters, vocab=vocab_size, window=window, batch=batch_size)
            yield what | _figures(*times, bandwidth)


def draw_rows(
    vocab_size: int, window: int, batch_size: int, *, device: torch.device, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """One dict as of `rows` for both ways to draw, with every filter; without a GPU both are the definition."""
    for filters, law in FILTERS.items():
        logits, slots, noise = _window(vocab_size, window, batch_size, device)
        numbers = law.numbers(True, vocab_size)
        slow = milliseconds(lambda: noise.categorical(law(logits, True, slots), slots, TOKEN), device)  # noqa: B023
        for op, kernel in DRAWS.items():
            run = kernel if device.type == "cuda" else draw_reference
            fast = milliseconds(lambda: run(logits, noise.keys, slots, None, TOKEN, numbers), device)  # noqa: B023
            what = dict(op=op, filters=filters, vocab=vocab_size, window=window, batch=batch_size)
            yield what | _figures(logits.numel() * logits.element_size(), fast, slow, bandwidth)


@torch.no_grad()
def layer_rows(
    window: int, batch_size: int, *, device: torch.device, bandwidth: float, sizes: tuple[int, ...] = XL
) -> Iterator[dict[str, Any]]:
    """One dict as of `rows` for each kernel of a transformer layer; it has no filters, and no vocabulary.

    Args:
        sizes: as in `XL`.
    """
    dim, hidden, heads, prefix, length = sizes
    make = {"dtype": torch.bfloat16, "device": device}
    count, size = 2 * batch_size, dim // heads
    x, change = torch.randn(2, count, window, dim, **make)
    gate, up = torch.randn(2, count, window, hidden, **make)
    projected = torch.randn(count, window, 3 * heads, size, **make)
    keys, values = torch.randn(2, count, heads, prefix + length + window, size, **make)
    places = torch.arange(window, device=device).repeat(count, 1) + prefix + length // 2
    turns = turns_of(torch.randn(count, window, size // 2, 2, device=device))
    weight, words = x[0, 0], torch.ones(count, prefix, dtype=torch.bool, device=device)
    queries = projected[:, :, :heads]
    seen = torch.arange(keys.shape[2], device=device) <= places[..., None]
    mask = torch.zeros(seen.shape, **make).masked_fill_(~seen, -torch.inf)[
        :, None
    ]  # [2B, 1, W, S], one a call

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask)

    read = 2 * count * heads * (prefix + length // 2 + window) * size
    ops: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "add_norm": (
            4 * x.numel(),
            lambda: add_norm(x, change, weight, 1e-5),
            lambda: add_norm_reference(x, change, weight, 1e-5),
        ),
        "gated": (3 * gate.numel(), lambda: gated(gate, up), lambda: gated_reference(gate, up)),
        "rotary_write": (
            2 * projected.numel(),
            lambda: rotary_write(projected, turns, keys, values, places),
            lambda: rotary_write_reference(projected, *turns, keys, values, places),
        ),
        "window_attention": (
            read + 2 * queries.numel(),
            lambda: window_attention(queries, keys, values, places, words),
            masked,
        ),
    }
    for op, (numbers, kernel, chain) in ops.items():
        times = 2 * numbers, milliseconds(kernel, device), milliseconds(chain, device)
        yield dict(op=op, filters="-", vocab="-", window=window, batch=batch_size) | _figures(
            *times, bandwidth
        )


def _figures(size: int, kernel: float, chain: float, bandwidth: float) -> dict[str, float]:
    """Of bytes, and milliseconds of kernel and chain."""
    rate = size / kernel * 1e3
    share = rate / bandwidth
    return dict(kernel_ms=kernel, chain_ms=chain, faster=chain / kernel, gb_per_s=rate / 1e9, share=share)


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call; on a GPU the second-level cache is flushed before each."""
    if device.type != "cuda":
        return 1000 * sorted(measure.timed(run, device)[1] for _ in range(3))[1]
    from triton import testing

    median: Any = testing.do_bench(run, warmup=25, rep=100, return_mode="median")
    return median


def _window(
    vocab_size: int, window: int, batch_size: int, device: torch.device
) -> tuple[Tensor, Tensor, CounterNoise]:
    """Logits [2B, W, V], the slots [B, W] that they predict, and the noise."""
    logits = 3 * torch.randn(2 * batch_size, window, vocab_size, dtype=torch.bfloat16, device=device)
    slots = torch.arange(window, device=device).repeat(batch_size, 1)
    return logits, slots, CounterNoise(torch.randint(2**62, (batch_size,)), device)


def _times(
    op: str, law: TokenLaw, vocab_size: int, window: int, batch_size: int, device: torch.device
) -> tuple[int, float, float]:
    """The bytes, and the milliseconds of kernel and chain."""
    logits, slots, noise = _window(vocab_size, window, batch_size, device)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("vocab", [16384, 65536]), ("window", [1, 32, 64])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a JSON document here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py measures Triton kernels, and finds no CUDA GPU here.")
    device = torch.device("cuda")
    top = measure.copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, a copy moves {top / 1e9:.0f} GB/s")
    lines: list[dict[str, Any]] = []
    where: dict[str, Any] = dict(device=device, bandwidth=top)
    sizes = list(product(args.vocab, args.window))
    for measured in (
        *(rows(vocab, window, args.batch, **where) for vocab, window in sizes),
        *(draw_rows(vocab, window, args.batch, **where) for vocab, window in sizes),
        *(layer_rows(window, args.batch, **where) for window in args.window),
    ):
        for row in measured:
            print(json_text(row), flush=True)
            lines.append(row)
    if args.out is not None:
        write_json(args.out, dict(copy_bandwidth=top, rows=lines), indent=1)


if __name__ == "__main__":
    main()
