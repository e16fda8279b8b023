"""A small ControlAR beside `shapes`: the share of an outline that its pictures meet, attributes, calls and time.

python benchmarks/control_pictures.py --control FOLDER --out benchmarks/results/shapes-control.json

FOLDER is what `python scripts/train control` wrote. The scenes are held out; `shapes` gets the caption, ControlAR the
caption and the outline. Each prompt is drawn by all rows in turn at batch 1, in processor time.

Edges of a picture are pixels whose left and right, or upper and lower neighbours differ by more than 50 of 255 in a
channel: textures have none, outlines do. Recall is the share of the outline with an edge within one pixel; precision is
the share of edges within one pixel of an edge of the true picture. "Read" is the outline of the objects that the parser
of `shapes` finds, held against the true one in the same way.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from visual_spec.data.shapes import Scene, caption, outline, sample_dataset
from visual_spec.data.shapes_finder import parse_picture
from visual_spec.data.shapes_parser import score
from visual_spec.eval.intervals import mean_figure, ratio_figure, share_figure
from visual_spec.eval.machine import environment
from visual_spec.files.whole import write_atomically
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training.tokens import to_signed

CONTRAST = 50  # of 255


def near(marked: np.ndarray) -> np.ndarray:
    """The pixels within one pixel of a marked one, bool `[H, W]`."""
    return np.lib.stride_tricks.sliding_window_view(np.pad(marked, 1), (3, 3)).any((2, 3))


def edges(picture: np.ndarray) -> np.ndarray:
    """The edges of a picture uint8 `[H, W, 3]`, bool `[H, W]`."""
    around = np.pad(picture.astype(int), ((1, 1), (1, 1), (0, 0)), mode="edge")
    across, along = around[1:-1, 2:] - around[1:-1, :-2], around[2:, 1:-1] - around[:-2, 1:-1]
    return np.maximum(abs(across), abs(along)).max(-1) > CONTRAST


def share(marked: np.ndarray, others: np.ndarray) -> float:
    """The share of marked pixels within one pixel of others; 0 of none."""
    return float((marked & near(others)).sum() / max(1, marked.sum()))


def judged(scene: Scene, true: np.ndarray, picture: np.ndarray) -> dict[str, float]:
    """What holds of a picture, each from 0 to 1."""
    lines, drawn, hits = outline(scene), edges(picture), score(caption(scene), picture)
    seen = [item for item in parse_picture(picture).objects if item.shape is not None]
    read: Any = outline(Scene(tuple(seen), "grey", "plain"))  # pyright: ignore
    return {
        "recall": share(lines, drawn),
        "precision": share(drawn, edges(true)),
        "read_recall": share(lines, read),
        "read_precision": share(read, lines),
        "attributes": float(np.mean(list(hits.values()))),
        "everything": float(all(hits.values())),
    }


def figures(answers: list[dict[str, float]]) -> dict[str, Any]:
    means = {name: share_figure([answer[name] for answer in answers]) for name in answers[0]}
    return {name: {key: round(value, 4) for key, value in figure.items()} for name, figure in means.items()}


def drawn(
    pipes: dict[str, Any], scenes: list[Scene], pictures: np.ndarray, guidance: float, keep: Path
) -> Any:
    """The rows of one guidance scale: each pipeline with its own sampler, and token by token."""
    fast = {name: pipe.sampler for name, pipe in pipes.items()}
    names = [(name, how) for name in pipes for how in ("jacobi", "plain")] + [("strength 0", "jacobi")]
    answers: dict[Any, list] = {name: [] for name in names}
    seconds: dict[Any, list] = {name: [] for name in names}
    calls: dict[Any, list] = {name: [] for name in names}
    same, shown = 0, []
    for index, (scene, true) in enumerate(zip(scenes, pictures, strict=True)):
        lines = np.repeat(outline(scene)[..., None], 3, 2).astype(np.uint8) * 255
        tokens, row = {}, [lines, true]
        for name, how in names[:: 1 if index % 2 else -1]:
            own = "shapes" if name == "shapes" else "control"
            pipe, more = pipes[own], {} if own == "shapes" else {"control": lines}
            pipe.sampler = fast[own] if how == "jacobi" else AutoregressiveSampler()
            if name == "strength 0":
                more["control_strength"] = 0.0
            generator = torch.Generator().manual_seed(index)
            began = time.process_time()
            out = pipe(caption(scene), generator=generator, guidance_scale=guidance, **more)
            seconds[name, how].append(time.process_time() - began)
            calls[name, how].append(int(out.trace.target_calls[0]))
            tokens[name, how] = out.tokens
            picture = np.asarray(out.images[0])
            answers[name, how].append(judged(scene, true, picture))
            if how == "jacobi" and name != "strength 0":
                row.append(picture)
        same += sum(torch.equal(tokens[name, "jacobi"], tokens[name, "plain"]) for name in pipes)
        shown.append(np.concatenate(row, 1))
    for name, pipe in pipes.items():
        pipe.sampler = fast[name]
    Image.fromarray(np.concatenate(shown[:12])).save(keep / f"control-{guidance:g}.png")
    rows = {
        " ".join(name): {
            **figures(answers[name]),
            "tokens_per_call": mean_figure([256 / number for number in calls[name]]),
            "processor_seconds": mean_figure(seconds[name]),
        }
        for name in names
        if name[1] == "jacobi"
    }
    for name in pipes:
        rows[f"{name} jacobi"]["speed_up"] = ratio_figure(seconds[name, "plain"], seconds[name, "jacobi"])
    per_scene = [
        one["recall"] - other["recall"]
        for one, other in zip(answers["control", "jacobi"], answers["shapes", "jacobi"], strict=True)
    ]
    return {"rows": rows, "equal_pictures": f"{same} of {2 * len(scenes)}", "gain": mean_figure(per_scene)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=48)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0, 4.0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--keep", type=Path, default=Path("/tmp"), help="folder for twelve pictures of each row"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipes = {"shapes": load_pipeline("shapes"), "control": load_pipeline(options.control)}
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    scenes, pictures = sample_dataset(options.scenes, 0, held_out=True)
    with torch.no_grad():
        again = [pipes["shapes"].vq_model.encode_tokens(to_signed(picture[None])) for picture in pictures]
        decoded = [np.asarray(pipes["shapes"].decode_tokens(tokens)[0]) for tokens in again]
    document: dict[str, Any] = {
        "environment": environment(torch.device("cpu"), torch.float32),
        "training": json.loads((options.control / "training.json").read_text()),
        "scenes": options.scenes,
        "bounds": {
            name: figures([judged(*parts) for parts in zip(scenes, pictures, shown, strict=True)])
            for name, shown in (("true pictures", pictures), ("the same through the tokenizer", decoded))
        },
    }
    for guidance in options.guidance:
        document[f"guidance {guidance:g}"] = drawn(pipes, scenes, pictures, guidance, options.keep)
        print(
            guidance,
            json.dumps(document[f"guidance {guidance:g}"], default=lambda v: round(v, 4)),
            flush=True,
        )
        write_atomically(options.out, json.dumps(document, separators=(",", ":")) + "\n", overwrite=True)


if __name__ == "__main__":
    main()
