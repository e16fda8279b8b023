"""A short evaluation of a tiny pipeline with a judge that needs no weights."""

import numpy as np
import torch

from tests.tiny import tiny_pipeline
from visual_spec.eval.quality.evaluate import evaluate
from visual_spec.eval.quality.samples import Judge
from visual_spec.eval.quality.tasks import Task
from visual_spec.eval.settings import parse_setting
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.samplers.core.law import TokenLaw

PROMPTS = [f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")] * 4
LAW = TokenLaw(guidance_scale=2.0)
ROWS = (
    "autoregressive",
    "autoregressive:temperature=0.5",
    "speculative-jacobi:window=4",
    "speculative-jacobi:window=4,coupling=independent,acceptance=exact",
)


def score(prompt, picture):
    """Depends on the prompt and on every pixel; some prompts ask for less than others."""
    total = int(picture.astype(np.int64).sum())
    hits = {"colour": bool(total % 2), "shape": total % 3 == 0}
    return hits if "red" in prompt else {"colour": hits["colour"]}


def make_judge() -> Judge:
    torch.manual_seed(3)
    network = ShapesFeatures({"a": 2}, num_features=4, image_size=16, channels=2).eval()
    network.spread.fill_(0.01)  # features of an untrained network hardly vary
    return Judge(score, {"shapes": network})


def make_task(count: int = 16) -> Task:
    pictures = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), np.uint8)
    return Task(PROMPTS[:count], pictures)


def evaluate_tiny(folder, *, pipe=None, rows=ROWS, law=LAW, **changes):
    settings = [parse_setting(text, law, changes.pop("seed", 0)) for text in rows]
    options = {"samples": 7, "batch_size": 3, **changes}
    return evaluate(pipe or tiny_pipeline(), settings, make_task(), make_judge(), folder, **options)


def timeless(document):
    """A document without what differs from run to run."""
    assert document is not None
    rows = [
        {key: value for key, value in row.items() if key not in ("wall_clock", "processor_time")}
        for row in document["rows"]
    ]
    return {**document, "rows": rows, "environment": None}
