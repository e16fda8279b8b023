"""Pictures by students of VAR: class and noise -> the tokens of all scales in one call or two -> picture."""

from __future__ import annotations

import os
from typing import Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.checkpoints import Source
from visual_spec.models.next_scale.var import VARTransformer, load_var_checkpoint
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel, load_var_vq_checkpoint
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import ScaleDecoder, check_scales
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.prototype.students.image_pipelines import StudentPipeline
from visual_spec.prototype.students.var import VARStudent, load_var_student


class DistilledScalePipeline(StudentPipeline, ClassImagePipeline):
    """Draws pictures of classes by a student of VAR, in one call or two.

    Args:
        transformer: the student.
        vq_model: turns token maps into pictures; the student draws its codes, and vectors between them.
        sampler: a `DistilledSampler`.
        id2label: as for `ClassImagePipeline`.
        default_guidance_scale, default_top_k: of the scales that the teacher draws. Guidance grows to this scale at the
            last scale; the published figures also have `top_p=0.95`.
        teacher: the VAR that the student learned from, for a sampler with `teacher_from`, the first slot of a scale.

    A call takes what `ClassImagePipeline` takes. Without a teacher there is no law to change: guidance, temperature,
    top-k and top-p are refused. With `output_type="latent"` its pictures are the canvas, [B, D, h, w].

    Raises:
        ValueError: a tokenizer or a teacher of other tokens, or another number of names than of classes.

    Example:
        >>> pipe = DistilledScalePipeline.from_official("var-d16.pth", "vae_ch160v4096z32.pth")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "teacher->transformer"
    _exclude_from_cpu_offload = ["vq_model"]  # a teacher reads its maps
    _optional_components = ["teacher"]
    _of_texts = ""
    _decoder = ScaleDecoder

    @registers
    def __init__(
        self,
        transformer: VARStudent,
        vq_model: MultiscaleVQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 3.0,
        default_top_k: int = 900,
        teacher: VARTransformer | None = None,
    ): ...

    @classmethod
    def from_official(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        transformer: Source,
        vq_model: str | os.PathLike,
        *,
        teacher: Source | None = None,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
        **config: Any,
    ) -> Self:
        """A pipeline around the files of Distilled Decoding and of VAR.

        Args:
            transformer: `var-d16.pth`, `var-d20.pth` or `var-d24.pth` of Distilled Decoding.
            vq_model: VAR's `vae_ch160v4096z32.pth`.
            teacher: VAR's file of the same depth, such as `var_d16.pth`, for scales that it draws again.
            dtype: of all weights; None keeps each file's own.
            sampler: default `DistilledSampler(steps=2)`.
            id2label: see the class.
            config: as for `load_var_student`. The published figures with a teacher have first_continuous=55, 255 and
                424 where it draws from slot 30, from slot 14, and all (`teacher_from`).

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        model = load_var_student(transformer, dtype=dtype, **config)
        drawing = None if teacher is None else load_var_checkpoint(teacher, scales=model.scales, dtype=dtype)
        tokenizer = load_var_vq_checkpoint(vq_model, dtype=dtype, scales=model.scales)
        return cls(model, tokenizer, sampler or make_sampler("distilled", steps=2), id2label, teacher=drawing)

    def _check_teacher(self, model: Any, teacher: Any) -> None:
        check_scales(model, teacher, "teacher draws", teacher.vocab_size, teacher.code_dim)

    @property
    def image_size(self) -> tuple[int, int]:
        return (self.vq_model.image_size, self.vq_model.image_size)

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: the codebook; with a teacher this and the tokenizer."""
        parts = super().sampler_parts()
        return parts | {"tokenizer": self.vq_model} if "teacher" in parts else parts
