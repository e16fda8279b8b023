"""LlamaGen's linear layers in one order of sums: a call's time with each step, equal bits, equal pictures, and tiles.

python -m benchmarks.one_order calls --model XL --out FILE
python -m benchmarks.one_order pictures --pictures 100 --out FILE
python -m benchmarks.one_order tiles --out FILE

`calls` times guided calls of 1, 32 and 64 tokens in the middle of a picture with random weights, as a replayed CUDA
graph: with separate layers, joined ones, the kernel with every launch after the end of the one before, with dependent
launches, and with weights in 8 bits. Beside each stand the bytes of its weights and cache over the bandwidth of a copy
in the same run, and how many of 64 tokens have the bits in that call that they have alone. `pictures` decodes captions
of `things` in bfloat16, plainly and by windows, and counts equal ones. `tiles` times the kernel with other tiles, on
which bits do not depend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quantised import condition_of, converted, loaded
from visual_spec.data.captions import captions_of
from visual_spec.eval import measure
from visual_spec.eval.draws import seeded
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text, write_json
from visual_spec.kernels import launch, project
from visual_spec.kernels.launch import dependent
from visual_spec.models.core.projections import fuse_projections
from visual_spec.models.core.saved import stored_parts
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.core.graph import forget
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

# Weights, whether projections are joined and computed by the kernel, and whether it is launched early.
STEPS: dict[str, tuple[str, bool, bool, bool]] = {
    "separate layers": ("bfloat16", False, False, False),
    "joined": ("bfloat16", True, False, False),
    "kernel": ("bfloat16", True, True, False),
    "kernel, dependent launch": ("bfloat16", True, True, True),
    "kernel, dependent launch, int8": ("int8", True, True, True),
    "kernel, dependent launch, e4m3": ("e4m3", True, True, True),
}
WIDTHS = (1, 32, 64)
# Rows of a program, its outputs and stages of loads.
TILES = [*product((16, 32, 64), (16, 32, 64), (2, 3, 4, 6))]


def prepared(model: Any, step: str) -> Any:
    weights, joined, kernel, early = STEPS[step]
    model.to(torch.bfloat16)
    if joined:
        fuse_projections(model, kernel=kernel)
    for module in (launch, project):
        vars(module)["dependent"] = dependent if early else lambda device: False
    return converted(model, weights)


def replayed(call: Callable[[], Tensor], device: torch.device) -> Callable[[], Any]:
    """The call as a CUDA graph; on a processor itself."""
    if device.type != "cuda":
        return call
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def calls(name: str, device: torch.device, bandwidth: float, rounds: int) -> list[dict[str, Any]]:
    """One row a step and width: median ms of a call, the floor, and tokens with the bits that they have alone."""
    rows = []
    for step in STEPS:
        model = prepared(loaded(name, str(device)), step)
        middle = model.grid.num_tokens // 2
        most = min(max(WIDTHS), model.grid.num_tokens - middle)
        slots = torch.arange(middle, middle + most, device=device)[None]
        tokens = slots % model.vocab_size
        state = model.prefill(condition_of(model), batch_size=1, guided=True, window=max(WIDTHS))
        alone = [model(state, tokens[:, at : at + 1], slots[:, at : at + 1]).clone() for at in range(most)]
        read = sum(
            part.nbytes
            for home in (model.layers, model.output)
            for weight in home.parameters()
            for part in stored_parts(weight)
        )
        held = sum(buffer.nbytes for buffer in state.cache.buffers()) / 2  # half a picture
        for width in WIDTHS:
            fed = tokens[:, :width], slots[:, :width]
            wide = model(state, *fed)
            equal = (wide == torch.cat(alone[:width], 1)).all(-1).all(0)
            run = replayed(lambda fed=fed: model(state, *fed), device)  # noqa: B023
            times = sorted(measure.timed(run, device)[1] for _ in range(rounds))
            row = dict(
                step=step, width=width, ms=1000 * times[rounds // 2], weight_bytes=read, cache_bytes=held
            )
            row |= dict(floor_ms=1000 * (read + held) / bandwidth, tokens=len(equal), equal=int(equal.sum()))
            rows.append(row)
            print(json_text(row), flush=True)
    return rows


def pictures(name: str, device: torch.device, count: int) -> list[dict[str, Any]]:
    """One row a step and window: pictures equal to those of plain decoding with the same step."""
    rows = []
    for step in ("joined", "kernel, dependent launch", "kernel, dependent launch, int8"):
        pipe = ImagePipeline.from_pretrained(name, torch_dtype=torch.bfloat16).to(device)
        pipe.set_progress_bar_config(disable=True)
        pipe.transformer = prepared(pipe.transformer, step)
        prompts, plain = captions_of(pipe).held_out_prompts(count), []
        for window in (1, 32, 64):
            samplers: Any = {1: AutoregressiveSampler()}
            pipe.sampler = samplers.get(window) or SpeculativeJacobiSampler(window, acceptance="identical")
            made = [
                pipe([prompt], generator=[generator], output_type="latent").tokens.cpu()
                for prompt, generator in zip(prompts, seeded(0, count), strict=True)
            ]
            plain = plain or made
            equal = sum(torch.equal(one, other) for one, other in zip(made, plain, strict=True))
            rows.append(dict(step=step, window=window, pictures=count, equal=equal))
            print(json_text(rows[-1]), flush=True)
        forget()
    return rows


@torch.no_grad()
def tiles(device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """One row a layer of LlamaGen-XL, number of rows and tile; the first is PyTorch's product alone."""
    from triton import testing

    rows = []
    shapes = {"in": (1280, 3840), "out": (1280, 1280), "gated": (1280, 7168), "down": (3584, 1280)}
    for (name, (inputs, outputs)), count in product(shapes.items(), (2, 32, 64, 128)):
        x = torch.randn(count, inputs, dtype=torch.bfloat16, device=device)
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        gate, norm = name == "gated", x[0] if name in ("in", "gated") else None
        residual = None if gate or name == "in" else torch.zeros(count, outputs, dtype=x.dtype, device=device)
        given = (x, weight, norm, 1e-5, None, None, residual, gate)
        first = project.project_triton(*given)
        for tile in (None, *TILES):
            row: dict[str, Any] = dict(layer=name, rows=count, tile=tile)
            row["floor_ms"] = 1000 * weight.nbytes / bandwidth

            def run(tile: Any = tile) -> Any:
                return F.linear(x, weight) if tile is None else project.project_triton(*given, tile=tile)  # noqa: B023

            try:
                row["ms"] = testing.do_bench(run, warmup=2, rep=10, return_mode="median")
                row["equal"] = tile is None or torch.equal(run(), first)
            except Exception as error:  # tiles that do not fit into shared memory are refused by the driver
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["calls", "pictures", "tiles"])
    parser.add_argument("--model", help="calls: a size of LlamaGen (default: XL); pictures: things")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=101, help="timed calls (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a JSON document here")
    args = parser.parse_args()
    device = torch.device(args.device)
    bandwidth = measure.copy_bandwidth(device)
    rows = {
        "calls": lambda: calls(args.model or "XL", device, bandwidth, args.rounds),
        "pictures": lambda: pictures(args.model or "things", device, args.pictures),
        "tiles": lambda: tiles(device, bandwidth),
    }[args.what]()
    document = {"kind": f"one-order-{args.what}", "environment": environment(device, torch.bfloat16)}
    document |= {"copy_bandwidth": bandwidth, "rows": rows}
    if args.out is not None:
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
