"""Train `ShapesFeatures` to read scenes of `shapes`.

It learns only what the picture determines. "A left of B" and "B right of A" are the same picture, so no object is
first: the occurring shapes, colours and sizes are learned as sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    IMAGE_SIZE,
    OBJECT_COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    sample_dataset,
)
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.training.loop import Descent, RunOptions, Trainer, read_options

LAYOUTS = ("alone", "side by side", "stacked", "inside", "overlapping")

# Heads by the kind of their outputs: one of several, a set, or numbers.
ONE_OF = {"background": tuple(BACKGROUND_COLOURS), "texture": TEXTURES, "count": (1, 2, 3), "layout": LAYOUTS}
SET_OF = {"shape": SHAPES, "colour": tuple(OBJECT_COLOURS), "size": tuple(SIZES)}
NUMBERS = {"centre": ("x", "y")}
HEADS = {name: len(values) for name, values in {**ONE_OF, **SET_OF, **NUMBERS}.items()}


@dataclass(frozen=True)
class ClassifierTraining:
    """Settings of a run. `noise`: standard deviation of the noise added to pictures of 0 to 255, so that features
    depend on the content rather than on the last bit of a pixel."""

    steps: int = 3000
    batch_size: int = 64
    scenes: int = 16000
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    noise: float = 8.0
    seed: int = 0


def layout(scene: Scene) -> str:
    """Return the arrangement of a scene's objects; a group counts as its row or column."""
    if len(scene.objects) == 1:
        return "alone"
    if scene.relation in ("inside", "overlapping"):
        return scene.relation
    first, last = scene.objects[0], scene.objects[-1]
    return "side by side" if abs(first.x - last.x) > abs(first.y - last.y) else "stacked"


def labels(scenes: list[Scene]) -> dict[str, Tensor]:
    """Return the targets of all heads: long [N] for one of several, float [N, count] for sets and numbers, 0 to 1."""
    facts = {
        "background": [scene.background for scene in scenes],
        "texture": [scene.texture for scene in scenes],
        "count": [len(scene.objects) for scene in scenes],
        "layout": [layout(scene) for scene in scenes],
    }
    columns = {
        name: torch.tensor([ONE_OF[name].index(value) for value in values]) for name, values in facts.items()
    }
    for name, values in SET_OF.items():
        columns[name] = torch.tensor(
            [
                [float(any(getattr(o, name) == value for o in scene.objects)) for value in values]
                for scene in scenes
            ]
        )
    middles = [np.mean([(item.x, item.y) for item in scene.objects], 0) / IMAGE_SIZE for scene in scenes]
    columns["centre"] = torch.tensor(np.array(middles), dtype=torch.float32)
    return columns


def loss_of(outputs: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
    """The sum over heads of cross entropy, binary cross entropy, or squared error, weighted to learn equally fast."""
    loss = torch.zeros(())
    for name, output in outputs.items():
        if name in ONE_OF:
            loss = loss + F.cross_entropy(output, wanted[name])
        elif name in SET_OF:
            loss = loss + 3 * F.binary_cross_entropy_with_logits(output, wanted[name])
        else:
            loss = loss + 20 * F.mse_loss(output, wanted[name])
    return loss


def train_classifier(
    model: ShapesFeatures, settings: ClassifierTraining, out: Path, *, every: int = 300
) -> dict:
    """Train in place, standardise the features, save half-precision weights in `out`, return the record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    wanted, pictures = small_dataset(settings.scenes, settings.seed, model.config["image_size"])
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    descend = Descent([optimiser], settings.steps, settings.learning_rate, clip=None)
    run = Trainer(model, settings, out, descend, every=every)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(pictures), size=settings.batch_size))
        some = pictures[chosen].float()
        # Every second picture is noisy: the model must read both kinds.
        strength = settings.noise * (rng.random((settings.batch_size, 1, 1, 1)) < 0.5)
        noise = rng.standard_normal(some.shape, dtype=np.float32) * strength.astype(np.float32)
        return chosen, some + torch.from_numpy(noise)

    def loss(chosen: Tensor, some: Tensor) -> Tensor:
        return loss_of(model.read(model.raw(some)), {name: one[chosen] for name, one in wanted.items()})

    def judged() -> dict[str, Any]:
        standardise(model, pictures[:4000])
        model.half().save_pretrained(out)
        model.float()  # evaluated as loaded later: weights rounded to half precision, single-precision compute
        return {"held_out": judge(model)}

    return run.run(loss, batch, judged)


def small_dataset(count: int, seed: int, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Labels of scenes and their pictures [N, 3, size, size] uint8, resampled like the network's, to save memory."""
    wanted, parts = [], []
    for start in range(0, count, 500):
        scenes, pictures = sample_dataset(min(500, count - start), seed * 100_003 + start)
        wanted.append(labels(scenes))
        small = F.interpolate(to_planes(pictures).float(), size=(size, size), mode="area")
        parts.append(small.round().to(torch.uint8))
    return {name: torch.cat([part[name] for part in wanted]) for name in HEADS}, torch.cat(parts)


@torch.no_grad()
def standardise(model: ShapesFeatures, pictures: Tensor) -> None:
    """Set the model's `centre` and `spread` so that each feature of these pictures has mean 0 and deviation 1."""
    raw = torch.cat([model.raw(part.float()) for part in pictures.split(100)])
    model.centre.copy_(raw.mean(0))
    model.spread.copy_(raw.std(0).clamp_min(1e-3))


@torch.no_grad()
def judge(model: ShapesFeatures, count: int = 1000) -> dict[str, float]:
    """Each head's accuracy on held-out scenes: one of several, whole sets, and for `centre` the error in pixels."""
    scenes, pictures = sample_dataset(count, 12345, held_out=True)
    wanted = labels(scenes)
    parts = [
        model.read(model.raw(to_planes(part).float())) for part in np.array_split(pictures, -(-count // 100))
    ]
    logits = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    result: dict[str, float] = {"pictures": count}
    for name, output in logits.items():
        if name in ONE_OF:
            result[name] = float((output.argmax(1) == wanted[name]).double().mean())
        elif name in SET_OF:
            result[name] = float(((output > 0) == (wanted[name] > 0)).all(1).double().mean())
        else:
            result[f"{name}_pixels"] = round(
                ((output - wanted[name]).square().mean().sqrt() * IMAGE_SIZE).item(), 2
            )
    return {name: round(value, 4) for name, value in result.items()}


def to_planes(pictures: np.ndarray) -> Tensor:
    """Return uint8 pictures [N, H, W, 3] as a tensor [N, 3, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2)


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the network whose features measure distances between sets of `shapes` pictures.

It takes about five minutes on a core.

`python scripts/train classifier --out weights/visual_spec_models/shapes_features`
"""


def main() -> None:
    options, settings = read_options(HELP, RunOptions, ClassifierTraining)
    torch.manual_seed(settings.seed)
    record = train_classifier(ShapesFeatures(heads=HEADS), settings, options.out)
    print(f"{record['parameters']} parameters, {record['seconds']} s, held out: {record['held_out']}")
