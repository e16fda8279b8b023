"""Tiny pipelines of distilled students, with or without a teacher."""

from typing import Any

import torch

from tests.helpers.tiny import quiet, tiny_text_encoder, tiny_transformer, tiny_vq_model
from tests.helpers.tiny_scales import tiny_var, tiny_var_vq
from tests.helpers.tiny_students import tiny_student, tiny_text_student, tiny_var_student
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.prototype.students.image_pipelines import DistilledImagePipeline, DistilledTextImagePipeline
from visual_spec.prototype.students.scale_pipeline import DistilledScalePipeline


def class_student_pipeline(teacher: bool = False, **settings: Any) -> Any:
    own = tiny_transformer(num_classes=7, caption_dim=None, prefix_length=1) if teacher else None
    parts = tiny_student(torch.float32), tiny_vq_model(), make_sampler("distilled", **settings)
    return quiet(DistilledImagePipeline(*parts, teacher=own))


def scale_student_pipeline(teacher: bool = False, **settings: Any) -> Any:
    parts = tiny_var_student(torch.float32), tiny_var_vq(), make_sampler("distilled", **settings)
    return quiet(DistilledScalePipeline(*parts, teacher=tiny_var(4, torch.float32) if teacher else None))


def text_student_pipeline(teacher: bool = True, **settings: Any) -> Any:
    own = tiny_transformer(zero_prefix_keys=False) if teacher else None
    parts = tiny_text_student(), tiny_vq_model(), tiny_text_encoder(), make_sampler("distilled", **settings)
    return quiet(DistilledTextImagePipeline(*parts, teacher=own))
