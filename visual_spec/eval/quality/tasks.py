"""What an evaluation asks a model for: held-out prompts, and the true samples they describe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from visual_spec.data import motion, shapes, shapes_classes, things, tunes, tunes_synth
from visual_spec.data.captions import captions_of
from visual_spec.eval.quality.prompt_files import PromptSet

if TYPE_CHECKING:
    from visual_spec.eval.pair import Pipeline

_OTHER_CLASSES = 1_000_003  # seed of the scenes that class models are compared with


@dataclass
class Task:
    """What is asked for: prompts, and for each the true sample.

    Attributes:
        prompts: at least as many as samples are drawn.
        pictures: uint8 [N, H, W, 3], of clips uint8 [N, T, H, W, 3], of music float32 [N, samples];
            None: of these prompts nobody knows what is true.
        source: what tells all prompts, however many are drawn.
    """

    prompts: list[str]
    pictures: Any
    source: str = "held-out captions"


def shapes_task(count: int, image_size: int) -> Task:
    """The captions of `shapes` that no trainer sees, and the scenes they describe."""
    scenes, pictures = shapes.sample_dataset(count, 0, held_out=True, size=image_size)
    return Task([shapes.caption(scene) for scene in scenes], pictures)


def things_task(count: int) -> Task:
    """The captions of `things` that no trainer sees, and the scenes they describe."""
    scenes, pictures = things.sample_dataset(count, 0, held_out=True)
    return Task([things.caption(scene) for scene in scenes], pictures)


def classes_task(count: int, image_size: int) -> Task:
    """The classes of `shapes` in turn, and for each a scene of the law that class models are trained on."""
    scenes = shapes_classes.sample_scenes_by_class(count, _OTHER_CLASSES)
    pictures = np.stack([shapes.render(scene, image_size) for scene in scenes])
    names = [shapes_classes.CLASS_NAMES[shapes_classes.class_of(scene)] for scene in scenes]
    return Task(names, pictures, "classes of shapes in turn")


def tunes_task(count: int) -> Task:
    """The captions of `tunes` that no trainer sees (`held_out_prompts`), and the clips they describe."""
    pieces, waves = tunes_synth.sample_dataset(count, 0, held_out=True)
    return Task([tunes.caption(tune) for tune in pieces], waves)


def motion_task(count: int) -> Task:
    """The captions of `motion` that no trainer sees (`held_out_prompts`), and the clips they describe."""
    clips = motion.sample_clips(count, 0, held_out=True)
    return Task([motion.caption(clip) for clip in clips], np.stack([motion.render(clip) for clip in clips]))


def own_task(prompts: PromptSet, count: int) -> Task:
    """Return the prompts of a file, each once, and from the first one again where there are fewer than `count`."""
    texts = [prompts.texts[index % len(prompts.texts)] for index in range(count)]
    return Task(texts, None, prompts.fingerprint)


def task_of(pipe: Pipeline, count: int) -> Task:
    """Return what a pipeline is asked for: captions, or classes where it draws the classes of `shapes`.

    Raises:
        ValueError: a pipeline that draws or plays something else.
    """
    if pipe.medium == "audio":
        length, rate = pipe.max_frames * pipe.samples_per_frame, pipe.sampling_rate
        if (rate, length) != (tunes.SAMPLE_RATE, tunes.NUM_SAMPLES):
            raise ValueError(
                f"this model plays {length} samples at {rate} Hz, and the tunes that the parser reads have "
                f"{tunes.NUM_SAMPLES} at {tunes.SAMPLE_RATE} Hz; pass a model such as tunes."
            )
        return tunes_task(count)
    if pipe.medium == "video":
        size, frames = pipe.image_size[0], pipe.num_frames
        if (size, frames) != (motion.FRAME_SIZE, motion.NUM_FRAMES):
            raise ValueError(
                f"this model draws {frames} frames of {size} pixels, and the clips that the parser reads have "
                f"{motion.NUM_FRAMES} of {motion.FRAME_SIZE}; pass a model such as motion."
            )
        return motion_task(count)
    if getattr(pipe, "num_classes", None) is None:
        return things_task(count) if captions_of(pipe) is things else shapes_task(count, pipe.image_size[0])
    if tuple(pipe.config.get("id2label") or ()) != shapes_classes.CLASS_NAMES:
        raise ValueError(
            "this model draws other classes than `shapes`, which no parser reads; pass a model such as "
            "shapes_var. (Models of official size are timed by visual-spec bench.)"
        )
    return classes_task(count, pipe.image_size[0])
