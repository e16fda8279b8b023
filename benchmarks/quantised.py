"""Weights in 8 and 4 bits beside 16 and 32: bytes, memory and time of a call, and of embedded models the pictures.

python benchmarks/quantised.py --models shapes things B L --out benchmarks/results/weights-in-few-bits.json
python benchmarks/quantised.py --models XL 3B --device cuda --out FILE

A model is an embedded one of captions, or a size of LlamaGen with random weights. Linear layers are quantised by
torchao, and computed as torchao computes them there. Times are of calls of 1 and of 16 slots, all kinds of weights in
turn: medians over rounds of the clock and of the processor, and of their ratios to bfloat16. Memory is what a process
of its own holds more with the model than before, and at most while it calls. Embedded models also decode prompts,
plainly and with a window: their tokens, and what the parser of the data reads.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import psutil
import torch

from visual_spec.data import shapes_parser, things_parser
from visual_spec.data.captions import captions_of
from visual_spec.eval.draws import seeded
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text, write_json
from visual_spec.models.core.saved import quantised_as, stored_parts
from visual_spec.models.next_token.llamagen import PRESETS, LlamaGenTransformer, TextCondition
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

KINDS = ("bfloat16", "float32", "int8", "e4m3", "int4")
SLOTS = (1, 16)


def converted(model: Any, kind: str) -> Any:
    """The model with weights of a kind: all in one type, or linear layers quantised beside bfloat16."""
    from torchao import quantization

    if kind in ("bfloat16", "float32"):
        return model.to(getattr(torch, kind))
    on_gpu = next(model.parameters()).is_cuda
    four = quantization.Int4WeightOnlyConfig if on_gpu else quantization.IntxWeightOnlyConfig
    how = {
        "int8": quantization.Int8WeightOnlyConfig,
        "e4m3": quantization.Float8WeightOnlyConfig,
        "int4": four if on_gpu else lambda: four(vars(torch)["int4"]),
    }[kind]()
    model.to(torch.bfloat16)
    quantization.quantize_(model, how)
    return model


def loaded(name: str, device: str) -> Any:
    if name not in PRESETS:
        return ImagePipeline.from_pretrained(name).transformer.to(device)
    torch.manual_seed(0)
    sizes: dict[str, Any] = PRESETS[name]
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaGenTransformer(**sizes).eval()
        finally:
            torch.set_default_dtype(previous)


def condition_of(model: Any) -> Any:
    """One row of a condition: a class, or no words but the last."""
    if model.config["num_classes"] is not None:
        return torch.zeros(1, dtype=torch.long, device=model.device)
    length = model.config["prefix_length"]
    features = torch.zeros(1, length, model.config["caption_dim"], dtype=model.dtype, device=model.device)
    return TextCondition(features, torch.ones(1, length, dtype=torch.bool, device=model.device))


def calls_of(model: Any) -> dict[int, Callable[[], None]]:
    """A guided call of so many slots, as in the middle of a picture."""
    state = model.prefill(condition_of(model), batch_size=1, guided=True, window=max(SLOTS))
    middle = model.grid.num_tokens // 2

    def call(width: int) -> None:
        slots = torch.arange(middle, middle + width, device=model.device)[None]
        with torch.no_grad():
            model(state, torch.zeros_like(slots), slots)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return {width: lambda width=width: call(width) for width in SLOTS}


def _memory(name: str, kind: str, device: str, answer: Any) -> None:
    """In a process of its own: bytes that it holds more with the model, and at most during calls."""
    torch.set_num_threads(1)
    converted(torch.nn.Sequential(torch.nn.Linear(64, 64, device=device)), kind)  # what libraries take once
    before = psutil.Process().memory_info().rss
    model = converted(loaded(name, device), kind)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        held = psutil.Process().memory_info().rss - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
    for call in calls_of(model).values():
        call()
    if device == "cuda":
        answer.put((held, torch.cuda.max_memory_allocated()))
        return
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    answer.put((held, peak - before))


def memory_of(name: str, kind: str, device: str) -> tuple[int, int]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_memory, args=(name, kind, device, answer))
    process.start()
    found = answer.get(timeout=600)
    process.join()
    return found


def in_turn(models: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Medians of the time of a call, in milliseconds, all models in turn."""
    calls = {kind: calls_of(model) for kind, model in models.items()}
    times: dict[Any, list[float]] = {}
    for turn in range(-1, rounds):  # the first warms up
        for kind, by_width in calls.items():
            for width, call in by_width.items():
                began, worked = time.perf_counter(), time.process_time()
                call()
                spent = time.perf_counter() - began, time.process_time() - worked
                for name, seconds in zip(("clock", "processor"), spent, strict=True):
                    if turn >= 0:
                        times.setdefault((kind, width, name), []).append(1000 * seconds)
    found: dict[str, dict[str, Any]] = {}
    for (kind, width, name), mine in times.items():
        first = times["bfloat16", width, name]
        found.setdefault(kind, {})[f"{name} ms, {width} slots"] = round(statistics.median(mine), 3)
        ratio = statistics.median(map(truediv, first, mine))
        found[kind][f"{name} speed-up over bfloat16, {width} slots"] = round(ratio, 3)
    return found


def drawn(pipes: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
    """Prompts decoded plainly and with the default window: seconds of the processor, equal tokens, and accuracy."""
    first = next(iter(pipes.values()))
    data = captions_of(first)
    prompts = data.held_out_prompts(count)
    score = things_parser.score if data.__name__.endswith("things") else shapes_parser.score
    found, reference = {}, None
    for kind, pipe in pipes.items():
        row: dict[str, Any] = {}
        tokens = []
        for name, pipe.sampler in {
            "plain": AutoregressiveSampler(),
            "window": SpeculativeJacobiSampler(),
        }.items():
            worked = time.process_time()
            made = pipe(prompts, generator=seeded(0, count), output_type="latent")
            row[f"{name}, processor seconds a picture"] = round((time.process_time() - worked) / count, 3)
            tokens.append(made.tokens)
            if name == "window":
                row["tokens per call"] = round(float(made.trace.tokens_per_call.mean()), 2)
                row["output"] = made.trace.output_text
        reference = tokens[0] if reference is None else reference
        row["equal to plain"] = int((tokens[0] == tokens[1]).all(1).sum())
        row["equal to bfloat16"] = int((tokens[0] == reference).all(1).sum())
        hits = [
            hit
            for prompt, picture in zip(prompts, pipe.decode_tokens(tokens[0].cpu()), strict=True)
            for hit in score(prompt, picture).values()
        ]
        row["attributes right"] = round(sum(hits) / len(hits), 3)
        row["pictures"] = count
        found[kind] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["shapes", "things", "B", "L"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompts", type=int, default=8, help="of embedded models; 0: none are decoded")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    document: dict[str, Any] = environment(torch.device(given.device), torch.bfloat16) | {"rows": []}
    for name in given.models:
        models = {kind: converted(loaded(name, given.device), kind) for kind in KINDS}
        times = in_turn(models, given.rounds)
        decoded: dict[str, dict[str, Any]] = {}
        if name not in PRESETS and given.prompts:
            pipes = {}
            for kind, model in models.items():
                pipes[kind] = ImagePipeline.from_pretrained(name, torch_dtype=model.dtype)
                pipes[kind].transformer = model
                pipes[kind].to(given.device)
                pipes[kind].set_progress_bar_config(disable=True)
            decoded = drawn(pipes, given.prompts)
        for kind, model in models.items():
            held, peak = memory_of(name, kind, given.device)
            weights = sum(part.nbytes for weight in model.parameters() for part in stored_parts(weight))
            row = {
                "model": name,
                "parameters": sum(weight.numel() for weight in model.parameters()),
                "weights": kind,
                "type": quantised_as(model),
                "weight bytes": weights,
                "memory with the model": held,
                "memory at most in calls": peak,
            }
            document["rows"].append(row | times[kind] | decoded.get(kind, {}))
        del models
        gc.collect()
        print(json_text(document["rows"][-len(KINDS) :], indent=1), flush=True)
        if given.out:
            write_json(given.out, document, indent=1)


if __name__ == "__main__":
    main()
