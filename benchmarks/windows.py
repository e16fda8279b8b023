"""Time windows of Jacobi decoding, "auto" and the default against plain decoding, in rounds that go through them all.

python benchmarks/windows.py --batch 1 4 8 --prompts 24 --out benchmarks/results/shapes-times.json
python benchmarks/windows.py --dtype bfloat16 --exact-width --batch 1 --prompts 12

All rows draw the same pictures in float32; the share of equal ones is printed. `--busy` runs another process beside.
"""

import argparse
import multiprocessing
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.captions import captions_of
from visual_spec.eval.draws import seeded
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def keep_a_core_busy() -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    while True:
        torch.mm(matrix, matrix)


def measure(pipe: ImagePipeline, samplers: dict[str, Any], prompts: list[str], batch: int) -> dict[str, Any]:
    """Total seconds, tokens per call and equal pictures of every sampler, over all prompts in batches."""
    rows = {name: {"seconds": 0.0, "calls": 0, "tokens": 0, "equal": 0} for name in samplers}
    for start in range(-batch, len(prompts), batch):  # the first batch warms up
        some = prompts[max(start, 0) :][:batch]
        plain = None
        for name, pipe.sampler in samplers.items():
            seeds = seeded(start, len(some))
            began = time.perf_counter()
            drawn = pipe(some, generator=seeds, output_type="latent")
            seconds = time.perf_counter() - began
            plain = drawn.images if plain is None else plain
            if start >= 0:
                rows[name]["seconds"] += seconds
                rows[name]["calls"] += int(drawn.trace.target_calls.sum())
                rows[name]["tokens"] += drawn.images.numel()
                rows[name]["equal"] += int((drawn.images == plain).flatten(1).all(1).sum())
    first = next(iter(rows.values()))["seconds"]
    return {
        name: {
            "seconds a picture": round(row["seconds"] / len(prompts), 4),
            "speed-up": round(first / row["seconds"], 3),
            "tokens per call": round(row["tokens"] / row["calls"], 2),
            "equal pictures": row["equal"],
        }
        for name, row in rows.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes", help="name or folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--windows", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument(
        "--drafts", choices=("carried", "repaired", "chosen"), nargs="+", help="default: repaired"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--exact-width", action="store_true", help="add plain and Jacobi decoding of one fixed width"
    )
    parser.add_argument("--busy", action="store_true", help="keep one core busy with other work")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pipe = ImagePipeline.from_pretrained(given.model, torch_dtype=getattr(torch, given.dtype))
    pipe.set_progress_bar_config(disable=True)
    samplers: dict[str, Any] = {"plain": AutoregressiveSampler()}
    for drafts, width in product(given.drafts or [None], [*given.windows, "auto", None]):
        name = ("default" if width is None else f"window {width}") + (f", {drafts}" if given.drafts else "")
        samplers[name] = SpeculativeJacobiSampler(width, drafts=drafts)
    if given.exact_width:
        samplers = {
            "plain, exact width": AutoregressiveSampler(exact_width=True),
            "window 32, exact width": SpeculativeJacobiSampler(32, exact_width=True),
            "plain": AutoregressiveSampler(),
            "window 32": SpeculativeJacobiSampler(32),
        }
    other = multiprocessing.Process(target=keep_a_core_busy, daemon=True)
    if given.busy:
        other.start()
    record = {
        "dtype": given.dtype,
        "threads": torch.get_num_threads(),
        "busy": given.busy,
        "prompts": given.prompts,
    }
    for batch in given.batch:
        record[f"batch {batch}"] = measure(
            pipe, samplers, captions_of(pipe).held_out_prompts(given.prompts), batch
        )
        print(json_text({f"batch {batch}": record[f"batch {batch}"]}, indent=1), flush=True)
    if given.out:
        write_json(given.out, record, indent=1)


if __name__ == "__main__":
    main()
