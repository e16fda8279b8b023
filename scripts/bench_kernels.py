"""Milliseconds of the kernels and of the chains of PyTorch ops that they replace, and the share of the bandwidth.

    python scripts/bench_kernels.py [--vocab 16384 65536] [--window 1 32 64] [--batch 1]

For a GPU; `visual_spec.eval.speed.kernel_bench` says what is measured.
"""

import argparse
import json
import sys
from itertools import product

import torch

from visual_spec.eval.speed import kernel_bench, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("vocab", [16384, 65536]), ("window", [1, 32, 64])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py measures Triton kernels, and finds no CUDA GPU here.")
    device = torch.device("cuda")
    top = measure.copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, a copy moves {top / 1e9:.0f} GB/s")
    for vocab, window in product(args.vocab, args.window):
        for row in kernel_bench.rows(vocab, window, args.batch, device=device, bandwidth=top):
            print(json.dumps(row), flush=True)
    for window in args.window:
        for row in kernel_bench.layer_rows(window, args.batch, device=device, bandwidth=top):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
