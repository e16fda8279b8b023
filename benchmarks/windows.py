"""Time windows of Jacobi decoding, "auto" and the default against plain decoding, batch by batch in turn.

python benchmarks/windows.py --batch 1 4 8 --prompts 24 --out benchmarks/results/shapes-times.json
python benchmarks/windows.py --dtype bfloat16 --exact-width --batch 1 --prompts 12
python benchmarks/windows.py --model things --batch 1 4 8 16 32 64 --rounds 4 --prompts 128 --default-only
python benchmarks/windows.py --model motion --default-only --drafter FOLDER   # of visual_spec.training.block_drafter

All rows draw the same pictures in float32; the share of equal ones is printed. `--busy` runs another process beside.
Beside the total, the medians over batches of the time on the clock and of the processor's are given, and of the ratios
of both to plain decoding's of the same batch: they hold on a machine that others use, too.
"""

import argparse
import multiprocessing
import statistics
import time
from itertools import product
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visual_spec.data.captions import captions_of
from visual_spec.eval.draws import seeded
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.loading import load_drafter, load_pipeline
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def keep_a_core_busy() -> None:
    torch.set_num_threads(1)
    matrix = torch.randn(512, 512)
    while True:
        torch.mm(matrix, matrix)


def measure(pipe: Any, samplers: dict[str, Any], prompts: list[str], batch: int) -> dict[str, Any]:
    """Seconds, tokens per call and equal pictures of every sampler, over all prompts in batches.

    A row holds: seconds a picture (of all batches together), speed-up (of these totals), the medians over batches of
    seconds on the clock and of the processor, of a picture, and those of plain decoding's over them.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {"clock": [], "processor": [], "calls": 0, "tokens": 0, "equal": 0} for name in samplers
    }
    reference = next(iter(samplers))
    for turn, start in enumerate((None, *range(0, len(prompts), batch))):
        some = prompts[:2] if start is None else prompts[start:][:batch]  # the first warms up
        images: dict[str, Tensor] = {}
        for name in [*samplers][:: -1 if turn % 2 else 1]:  # who is first has no advantage
            pipe.sampler = samplers[name]
            seeds = seeded(start or 0, len(some))
            began, worked = time.perf_counter(), time.process_time()
            drawn = pipe(some, generator=seeds, output_type="latent")
            seconds, processor = time.perf_counter() - began, time.process_time() - worked
            images[name] = drawn.tokens
            if start is not None:
                rows[name]["clock"].append(seconds / len(some))
                rows[name]["processor"].append(processor / len(some))
                rows[name]["calls"] += int(drawn.trace.target_calls.sum())
                rows[name]["tokens"] += drawn.tokens.numel()
        if start is not None:
            for name, row in rows.items():
                row["equal"] += int((images[name] == images[reference]).flatten(1).all(1).sum())
    first = rows[reference]
    return {
        name: {
            "seconds a picture": round(statistics.mean(row["clock"]), 4),
            "speed-up": round(sum(first["clock"]) / sum(row["clock"]), 3),
            **{
                f"{kind} time": {
                    "median seconds a picture": round(statistics.median(row[kind]), 4),
                    "median speed-up": round(statistics.median(map(truediv, first[kind], row[kind])), 3),
                }
                for kind in ("clock", "processor")
            },
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
    parser.add_argument("--rounds", type=int, help="batches of each size, of --prompts at most")
    parser.add_argument("--windows", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--default-only", action="store_true", help="no other window, and not auto")
    parser.add_argument(
        "--drafts", choices=("carried", "repaired", "chosen"), nargs="+", help="default: repaired"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--exact-width", action="store_true", help="add plain and Jacobi decoding of one fixed width"
    )
    parser.add_argument(
        "--drafter", type=Path, help="folder of a block drafter: add a row that drafts with it"
    )
    parser.add_argument("--busy", action="store_true", help="keep one core busy with other work")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    pipe: Any = load_pipeline(given.model, torch_dtype=getattr(torch, given.dtype))
    pipe.set_progress_bar_config(disable=True)
    samplers: dict[str, Any] = {"plain": AutoregressiveSampler()}
    widths = [*given.windows, "auto", None]
    for drafts, width in product(given.drafts or [None], [None] if given.default_only else widths):
        name = ("default" if width is None else f"window {width}") + (f", {drafts}" if given.drafts else "")
        own = width is None and drafts is None  # the pipeline's: clips have a window of their own
        samplers[name] = pipe.sampler if own else SpeculativeJacobiSampler(width, drafts=drafts)
    if given.drafter is not None:
        pipe.drafter = load_drafter(given.drafter)
        for drafted in (8, 15):
            samplers[f"{drafted} drafts of a block"] = BlockDraftSampler(drafted=drafted)
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
        **environment(torch.device("cpu"), pipe.transformer.dtype),
        "model": given.model,
        "busy": given.busy,
        "prompts": given.prompts,
        "rounds": given.rounds,
    }
    for batch in given.batch:
        count = given.prompts if given.rounds is None else min(given.prompts, given.rounds * batch)
        prompts = captions_of(pipe).held_out_prompts(count)
        record[f"batch {batch}"] = measure(pipe, samplers, prompts, batch)
        print(json_text({f"batch {batch}": record[f"batch {batch}"]}, indent=1), flush=True)
        if given.out:  # after each size: what was measured stays
            write_json(given.out, record, indent=1, overwrite=True)


if __name__ == "__main__":
    main()
