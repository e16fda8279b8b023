"""Milliseconds of the law kernels and of the samplers' chains of PyTorch ops, and the share of the memory's bandwidth.

    python scripts/bench_kernels.py [--vocab 16384 65536] [--window 1 32 64] [--batch 1]

For a GPU. Logits are random bfloat16 with guidance. Bytes are what must move: the logits of both rows, and for `verify`
the law written and, of the half of the drafts that is refused, the law read. The bandwidth is that of a copy here.
"""

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from visual_spec.kernels.draw import draw
from visual_spec.kernels.verify import verify
from visual_spec.samplers.core.acceptance import accepted_prefix, exact_acceptance, residual
from visual_spec.samplers.core.base import columns_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise

FILTERS = {
    "none": TokenLaw(guidance_scale=4.0),
    "top-k": TokenLaw(guidance_scale=4.0, top_k=2000),
    "top-p": TokenLaw(guidance_scale=4.0, top_p=0.9),
    "both": TokenLaw(guidance_scale=4.0, top_k=2000, top_p=0.9),
}
DEVICE = "cuda"


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a call on the device; the second-level cache is flushed before each."""
    from triton import testing

    found: Any = testing.do_bench(run, warmup=25, rep=100, return_mode="median")
    return found


def bandwidth() -> float:
    """Bytes a second of a copy, those read and those written."""
    source = torch.empty(2**28, device=DEVICE)
    copy = torch.empty_like(source)
    return 2 * source.numel() * 4 / milliseconds(lambda: copy.copy_(source)) * 1e3


def measure(
    op: str, law: TokenLaw, vocab_size: int, window: int, batch_size: int
) -> tuple[int, float, float]:
    """The bytes, and the milliseconds of kernel and chain."""
    logits = 3 * torch.randn(2 * batch_size, window, vocab_size, dtype=torch.bfloat16, device=DEVICE)
    slots = torch.arange(window, device=DEVICE).repeat(batch_size, 1)
    noise = CounterNoise(torch.randint(2**62, (batch_size,)), DEVICE)
    plain, size = law.numbers(True, vocab_size), logits.numel() * logits.element_size()
    if op == "draw":
        fast = milliseconds(lambda: draw(logits, noise.keys, slots, plain, stream=TOKEN))
        slow = milliseconds(lambda: noise.categorical(law(logits, True, slots), slots, TOKEN))
        return size, fast, slow
    # Every other draft is the likeliest token of its law, which is kept; the rest are refused, but by chance.
    stored = law(logits, True, slots)
    drafts = torch.where(slots % 2 == 0, stored.argmax(-1), stored.argmin(-1))
    kinds = slots.masked_fill(slots == window - 1, -1)
    noises = dict(round=1, accept_stream=ACCEPT, residual_stream=RESIDUAL, draw_stream=TOKEN)

    def chain() -> None:
        target = law(logits, True, slots)
        probability = exact_acceptance(target[:, :-1], stored[:, :-1], drafts[:, :-1])
        kept = accepted_prefix(noise.bernoulli(probability, slots[:, :-1], ACCEPT, 1))[:, None]
        left = residual(columns_of(target, kept), columns_of(stored, kept))
        noise.categorical(left, slots.gather(1, kept), RESIDUAL, 1)
        noise.categorical(target, slots, TOKEN)

    kernel = milliseconds(lambda: verify(logits, drafts, stored, kinds, noise.keys, slots, plain, **noises))
    return size + 6 * stored.numel(), kernel, milliseconds(chain)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("vocab", [16384, 65536]), ("window", [1, 32, 64])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py measures Triton kernels, and finds no CUDA GPU here.")
    top = bandwidth()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, a copy moves {top / 1e9:.0f} GB/s")
    for vocab, window, name, op in product(args.vocab, args.window, FILTERS, ("draw", "verify")):
        size, kernel, chain = measure(op, FILTERS[name], vocab, window, args.batch)
        rate = size / kernel * 1e3
        row = dict(op=op, filters=name, vocab=vocab, window=window, kernel_ms=kernel, chain_ms=chain)
        row |= dict(faster=chain / kernel, gb_per_s=rate / 1e9, share=rate / top)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
