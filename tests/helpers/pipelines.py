"""One tiny pipeline of each kind, for tests of what holds for all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from scripts.train.causal_video import new_model
from tests.helpers import infinity
from tests.helpers.distilled_pipelines import (
    class_student_pipeline,
    scale_student_pipeline,
    text_student_pipeline,
)
from tests.helpers.music_settings import magnet_sampler
from tests.helpers.tiny import (
    seeded,
    tiny_frame_pipeline,
    tiny_masked_pipeline,
    tiny_masked_transformer,
    tiny_pipeline,
    tiny_transformer,
    tiny_video_pipeline,
    tiny_vq_model,
)
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice, Schedule
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler


@dataclass(frozen=True)
class Kind:
    """A kind of pipeline.

    Attributes:
        make: a new one, always with the same weights.
        asked: what a call asks for: a prompt, or class labels.
        each: what the number of samples of each of them is called.
    """

    make: Callable[[], Any]
    asked: Any
    each: str = "num_images_per_prompt"
    settings: dict[str, Any] = field(default_factory=dict)

    def ask(self, pipe: Any, *, seed: int = 0, **settings: Any) -> Any:
        """What the pipeline makes of one prompt and one seed."""
        return pipe(self.asked, generator=seeded(seed), **{"output_type": "pt", **self.settings, **settings})


def _classes() -> Any:
    transformer = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1)
    return ClassImagePipeline(transformer, tiny_vq_model(), AutoregressiveSampler())


def _masked() -> Any:
    return tiny_audio_pipeline(magnet_sampler(), masked=True, reach=4)


def _masked_classes() -> Any:
    transformer = tiny_masked_transformer(num_classes=5, caption_dim=None, prefix_length=0)
    return MaskedClassImagePipeline(transformer, tiny_vq_model(), MaskedSampler(steps=5))


def _chunks() -> Any:
    transformer, encoder = new_model(24, 1, 2)
    return ChunkVideoPipeline(transformer.eval(), encoder.eval(), ChunkWiseSampler(chunk=2, shift=3.0))


def _quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        pipe = make()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return made


_TAUGHT: dict[str, Any] = {"teacher": True, "steps": 2, "teacher_from": 0}
_SMALL = {"num_frames": 2, "steps": 1}
KINDS: dict[str, Kind] = {
    "captions": Kind(_quiet(tiny_pipeline), "a red circle"),
    "video": Kind(_quiet(tiny_video_pipeline), "a red circle", "num_videos_per_prompt"),
    "classes": Kind(_quiet(_classes), 3, "num_images_per_label"),
    "scales": Kind(_quiet(tiny_scale_pipeline), 3, "num_images_per_label"),
    "bits": Kind(_quiet(infinity.tiny_pipeline), "a red circle"),
    "masked captions": Kind(
        _quiet(
            partial(
                tiny_masked_pipeline,
                MaskedSampler(
                    5, schedule=Schedule(schedule="arccos", clock="halton"), choice=Choice(score="halton")
                ),
            )
        ),
        "a red circle",
    ),
    "masked classes": Kind(_quiet(_masked_classes), 3, "num_images_per_label"),
    "music": Kind(_quiet(tiny_audio_pipeline), "a slow sad organ", "num_waveforms_per_prompt"),
    "masked music": Kind(_quiet(_masked), "a slow sad organ", "num_waveforms_per_prompt"),
}
# And those with other parts or another output; what holds for pipelines of any class is tested of all.
ALL: dict[str, Kind] = KINDS | {
    "frames": Kind(_quiet(tiny_frame_pipeline), "a red circle", "num_videos_per_prompt"),
    "latents": Kind(_quiet(tiny_latent_pipeline), 3, "num_images_per_label"),
    "causal latents": Kind(_quiet(partial(tiny_latent_pipeline, "causal")), 3, "num_images_per_label"),
    "students": Kind(_quiet(partial(class_student_pipeline, **_TAUGHT)), 3, "num_images_per_label"),
    "students of scales": Kind(_quiet(partial(scale_student_pipeline, **_TAUGHT)), 3, "num_images_per_label"),
    "students of captions": Kind(_quiet(partial(text_student_pipeline, **_TAUGHT)), "a red circle"),
    "chunks": Kind(_quiet(_chunks), "a small red star moves right", "num_videos_per_prompt", _SMALL),
}
