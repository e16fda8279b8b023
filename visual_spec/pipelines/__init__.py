"""Pipelines: prompt in, picture, clip or music out.

Names are resolved at first use, because diffusers takes seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from visual_spec.pipelines.components import PIPELINES

if TYPE_CHECKING:
    from visual_spec.pipelines.amused_image import AmusedImagePipeline
    from visual_spec.pipelines.audio import AudioPipeline
    from visual_spec.pipelines.base import VisualPipeline
    from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
    from visual_spec.pipelines.class_image import ClassImagePipeline
    from visual_spec.pipelines.distilled_image import DistilledImagePipeline, DistilledTextImagePipeline
    from visual_spec.pipelines.distilled_scales import DistilledScalePipeline
    from visual_spec.pipelines.image import ImagePipeline
    from visual_spec.pipelines.infinity import InfinityPipeline
    from visual_spec.pipelines.latent_image import LatentImagePipeline
    from visual_spec.pipelines.loading import load_pipeline
    from visual_spec.pipelines.mage_image import MageImagePipeline
    from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline
    from visual_spec.pipelines.masked_image import MaskedImagePipeline
    from visual_spec.pipelines.maskgct import MaskgctPipeline
    from visual_spec.pipelines.output import AudioPipelineOutput, ImagePipelineOutput, VideoPipelineOutput
    from visual_spec.pipelines.scale_image import ScaleImagePipeline
    from visual_spec.pipelines.video import VideoPipeline

# `accelerate` is not offered here: the name is that of the sub-module.
_HOME = PIPELINES | {
    "AudioPipelineOutput": "visual_spec.pipelines.output",
    "ImagePipelineOutput": "visual_spec.pipelines.output",
    "VideoPipelineOutput": "visual_spec.pipelines.output",
    "VisualPipeline": "visual_spec.pipelines.base",
    "load_pipeline": "visual_spec.pipelines.loading",
}

__all__ = [
    "AmusedImagePipeline",
    "AudioPipeline",
    "AudioPipelineOutput",
    "ChunkVideoPipeline",
    "ClassImagePipeline",
    "DistilledImagePipeline",
    "DistilledScalePipeline",
    "DistilledTextImagePipeline",
    "ImagePipeline",
    "ImagePipelineOutput",
    "InfinityPipeline",
    "LatentImagePipeline",
    "MageImagePipeline",
    "MaskedClassImagePipeline",
    "MaskedImagePipeline",
    "MaskgctPipeline",
    "ScaleImagePipeline",
    "VideoPipeline",
    "VideoPipelineOutput",
    "VisualPipeline",
    "load_pipeline",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(
            f"module 'visual_spec.pipelines' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOME[name]), name)
