"""A small ControlAR beside `shapes`: the share of an outline that its pictures meet, attributes, calls and time.

python benchmarks/control_pictures.py --models control=FOLDER --out benchmarks/results/shapes-control.json

FOLDER is what `scripts/assemble.py shapes_control` wrote; several may be named. The scenes are held out. `shapes` gets
the caption, a ControlAR the caption and the outline. Figures of pictures come from batches of 12, by the default
sampler and token by token; a run that was stopped goes on with the rows that `--out` lacks. Times are of single
pictures of the first model and of `shapes`, all in turn, in processor time.

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
from visual_spec.eval.draws import seeded
from visual_spec.eval.intervals import mean_figure, ratio_figure, rounded, share_figure
from visual_spec.eval.machine import environment
from visual_spec.files.documents import json_text, write_json
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.training.tokens import to_signed

BATCH = 12
CONTRAST = 50  # of 255


def near(marked: np.ndarray) -> np.ndarray:
    """The pixels within one pixel of a marked one, bool `[H, W]`."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(marked, 1), (3, 3))
    return np.asarray(around.any((2, 3)))


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
    return {name: rounded(share_figure([answer[name] for answer in answers])) for name in answers[0]}


def asked(pipe: Any, scenes: list[Scene]) -> dict[str, Any]:
    """What a pipeline is called with for some scenes."""
    lines = [np.repeat(outline(scene)[..., None], 3, 2).astype(np.uint8) * 255 for scene in scenes]
    more = {"control": lines} if hasattr(pipe.transformer, "control_size") else {}
    return {"prompt": [caption(scene) for scene in scenes], **more}


def row_of(
    pipe: Any, scenes: list[Scene], pictures: np.ndarray, guidance: float, keep: Path
) -> dict[str, Any]:
    """The figures of one model at one guidance scale; the first pictures go to a file."""
    fast, shown, calls, same = pipe.sampler, [], [], 0
    for start in range(0, len(scenes), BATCH):
        part = scenes[start : start + BATCH]
        given = {**asked(pipe, part), "guidance_scale": guidance}
        out = pipe(**given, generator=seeded(start, len(part)))
        pipe.sampler = AutoregressiveSampler()
        plain = pipe(**given, generator=seeded(start, len(part)), output_type="latent").tokens
        pipe.sampler = fast
        same += int((plain == out.tokens).all(1).sum())
        calls += [256 / number for number in out.trace.target_calls.tolist()]
        shown += [np.asarray(picture) for picture in out.images]
    sheet = [np.concatenate([np.repeat(outline(one)[..., None], 3, 2) * np.uint8(255), true, own], 1)
             for one, true, own in zip(scenes[:12], pictures, shown, strict=False)]  # fmt: skip
    Image.fromarray(np.concatenate(sheet)).save(keep)
    answers = [judged(*parts) for parts in zip(scenes, pictures, shown, strict=True)]
    return {
        **figures(answers),
        "tokens_per_call": rounded(mean_figure(calls)),
        "equal_pictures": f"{same} of {len(scenes)}",
        "recall_of_each": [round(answer["recall"], 3) for answer in answers],
    }


def times(pipes: dict[str, Any], scenes: list[Scene], guidance: float) -> dict[str, Any]:
    """Processor seconds of single pictures, token by token and by the default sampler, in turn."""
    seconds: dict[str, list[float]] = {}
    for index, scene in enumerate(scenes):
        for name, pipe in list(pipes.items())[:: 1 if index % 2 else -1]:
            fast = pipe.sampler
            for how, sampler in (("plain", AutoregressiveSampler()), ("jacobi", fast)):
                pipe.sampler = sampler
                began = time.process_time()
                pipe(**asked(pipe, [scene]), guidance_scale=guidance, generator=seeded(index, 1))
                seconds.setdefault(f"{name} {how}", []).append(time.process_time() - began)
    means: dict[str, Any] = {name: rounded(mean_figure(values)) for name, values in seconds.items()}
    for name in pipes:
        means[f"{name} speed-up"] = rounded(ratio_figure(seconds[f"{name} plain"], seconds[f"{name} jacobi"]))
    return {"guidance": guidance, "pictures": len(scenes), **means}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[], help="NAME=FOLDER of a ControlAR")
    parser.add_argument("--scenes", type=int, default=48)
    parser.add_argument("--timed", type=int, default=12, help="pictures that are timed; 0: none")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0, 4.0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True, help="folder for twelve pictures of each row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = dict(name.split("=") for name in options.models)
    pipes = {name: load_pipeline(folder) for name, folder in ({"shapes": "shapes"} | folders).items()}
    for pipe in pipes.values():
        pipe.set_progress_bar_config(disable=True)
    scenes, pictures = sample_dataset(options.scenes, 0, held_out=True)
    document: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def store(name: str, value: Any) -> None:
        document[name] = value
        print(name, json_text(value)[:900], flush=True)
        write_json(options.out, document)

    if "bounds" not in document:
        model = pipes["shapes"].vq_model
        with torch.no_grad():
            again = [model.encode_tokens(to_signed(picture[None])) for picture in pictures]
        through = [np.asarray(pipes["shapes"].decode_tokens(tokens)[0]) for tokens in again]
        store("environment", environment(torch.device("cpu"), torch.float32))
        bounds = {"true pictures": pictures, "the same through the tokenizer": through}
        store("bounds", {
            name: figures([judged(*parts) for parts in zip(scenes, pictures, shown, strict=True)])
            for name, shown in bounds.items()
        })  # fmt: skip
    for name, folder in folders.items():
        store(f"{name}, training", json.loads((Path(folder) / "transformer" / "training.json").read_text()))
    for guidance in options.guidance:
        for name, pipe in pipes.items():
            row = f"{name}, guidance {guidance:g}"
            if row not in document:
                store(row, row_of(pipe, scenes, pictures, guidance, options.keep / f"{row}.png"))
    if options.timed:
        first = dict(list(pipes.items())[:2])
        store("times", times(first, scenes[: options.timed], options.guidance[0]))


if __name__ == "__main__":
    main()
