"""Pictures by students of Distilled Decoding: condition and noise -> all tokens in one call or two -> picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.class_image import ClassImagePipeline
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import CodesDecoder
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.sampler_text import make_sampler
from visual_spec.pipelines.token_image import TokenImagePipeline
from visual_spec.records import PipelineFacts
from visual_spec.samplers.core.law import TokenLaw

if TYPE_CHECKING:
    from visual_spec.models.core.checkpoints import Source
    from visual_spec.models.next_token.llamagen import LlamaGenTransformer
    from visual_spec.models.next_token.llamagen_vq import VQModel
    from visual_spec.models.text.caption_encoder import CaptionEncoder
    from visual_spec.prototype.students.llamagen import LlamaGenStudent


class StudentPipeline(TokenImagePipeline):
    """What pipelines around a student share, whatever it draws from. Registers a `teacher` beside."""

    _decoder = CodesDecoder
    teacher: Any

    def _check_parts(self) -> None:
        super()._check_parts()
        if self.teacher is not None and self._is_whole:
            self._check_teacher(self.transformer, self.teacher)

    def _check_teacher(self, model: Any, teacher: Any) -> None:
        classes = model.config["num_classes"] is not None
        if classes != (teacher.config["num_classes"] is not None):
            kind, own = ("text", "classes") if classes else ("class", "captions")
            raise ValueError(
                f"the teacher is {kind}-conditional, and this student, which draws {own}, did not learn from it; pass "
                "the model that it learned from."
            )
        if (teacher.grid, teacher.vocab_size) != (model.grid, model.vocab_size):
            raise ValueError(
                f"the teacher draws {teacher.grid} out of {teacher.vocab_size} tokens, and the student {model.grid} "
                f"out of {model.vocab_size}; pass the model that the student learned from."
            )

    @classmethod
    def facts_of(cls, settings: Mapping[str, Any], sampler: Mapping[str, Any]) -> PipelineFacts:
        """See `VisualPipeline.facts_of`. The saved law is the teacher's, used where the teacher draws."""
        alone = sampler.get("teacher_from") is None
        law = {"guidance_scale": 1.0, "top_k": 0} if alone else {}  # the student's law is in its weights
        facts = super().facts_of(settings, sampler)
        return replace(facts, default_settings={**facts.default_settings, **law})

    def make_law(self, *args: Any, **settings: Any) -> TokenLaw:
        """The law of the teacher's tokens; None is the default of this pipeline.

        Raises:
            ValueError: a value out of its range, or any but the default where no teacher draws.
        """
        law = super().make_law(*args, **settings)
        if self._setting("teacher_from") is None and law != TokenLaw():
            raise ValueError(
                f"{law} given, but the student draws alone, and its law is in its weights; leave guidance, "
                "temperature, top_k, top_p and guidance_until out, or let a teacher draw some tokens: "
                "DistilledSampler(steps=2, teacher_from=slot)."
            )
        return law

    def check_drafter(self) -> None:
        """As `VisualPipeline.check_drafter`; also refuses a sampler whose teacher is not there."""
        start = self._setting("teacher_from")
        if start is not None and self.teacher is None:
            raise ValueError(
                f"the sampler has teacher_from={start}, and this pipeline has no teacher; set pipe.teacher to the "
                "model that the student learned from."
            )
        super().check_drafter()

    def sampler_parts(self) -> dict[str, Any]:
        """What the sampler asks for beside the model: the codebook, the teacher."""
        with at_hand(self.vq_model):
            parts: dict[str, Any] = {"codebook": self.decoder.codebook}
        return parts if self.teacher is None else parts | {"teacher": self.teacher}

    def _used(self, parts: Mapping[str, object]) -> tuple[object, ...]:
        return () if self._setting("teacher_from") is None else (self.teacher,)


class DistilledImagePipeline(StudentPipeline, ClassImagePipeline):
    """Draws pictures of classes by a student of LlamaGen, in one call or two.

    Args:
        transformer: the student.
        vq_model: turns tokens into pictures; the student draws its codes, and vectors between them.
        sampler: a `DistilledSampler`.
        id2label: as for `ClassImagePipeline`.
        default_guidance_scale, default_top_k: of the tokens that the teacher draws.
        teacher: the model that the student learned from, for a sampler with `teacher_from`.

    A call takes what `ClassImagePipeline` takes. Without a teacher there is no law to change: guidance, temperature,
    top-k and top-p are refused. With `output_type="latent"` its pictures are the vectors, [B, d, h, w].

    Raises:
        ValueError: a tokenizer or a teacher of other tokens, a student or a teacher of captions, or a number of names
            that is not the number of classes.

    Example:
        >>> pipe = DistilledImagePipeline.from_official("llamagen-L.pt", "vq_ds16_c2i.pt")
        >>> pipe([207, 360], generator=torch.Generator().manual_seed(0)).images[0].save("retriever.png")
    """

    model_cpu_offload_seq = "teacher->transformer->vq_model"
    _optional_components = ["teacher"]
    _of_texts = "DistilledTextImagePipeline"

    @registers
    def __init__(
        self,
        transformer: LlamaGenStudent,
        vq_model: VQModel,
        sampler: SchedulerMixin,
        id2label: list[str] | None = None,
        default_guidance_scale: float = 2.0,
        default_top_k: int = 0,
        teacher: LlamaGenTransformer | None = None,
    ): ...

    @classmethod
    def from_official(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        transformer: Source,
        vq_model: Source,
        *,
        teacher: Source | None = None,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
        id2label: list[str] | None = None,
    ) -> Self:
        """A pipeline around the files of Distilled Decoding and of LlamaGen.

        Args:
            transformer: `llamagen-B.pt` or `llamagen-L.pt`.
            vq_model: LlamaGen's `vq_ds16_c2i.pt`.
            teacher: LlamaGen's `c2i_B_256.pt` or `c2i_L_256.pt`, for tokens that it draws again.
            dtype: of all weights; None keeps each file's own.
            sampler: default `DistilledSampler(steps=2)`.
            id2label: see the class.

        Raises:
            ValueError, OSError: a file that is none of these; says what it is.
        """
        from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer, load_transformer
        from visual_spec.prototype.students.llamagen import load_llamagen_student

        model = load_llamagen_student(transformer, dtype=dtype)
        tokenizer = load_tokenizer(vq_model, dtype=dtype)
        side = model.grid.width * tokenizer.patch_size
        tokenizer.register_to_config(image_size=side)
        drawing = None
        if teacher is not None:
            drawing = load_transformer(teacher, image_size=side, patch_size=tokenizer.patch_size, dtype=dtype)
        return cls(
            model,
            tokenizer,
            sampler or make_sampler("distilled", steps=2),
            id2label,
            teacher=drawing,
        )


class DistilledTextImagePipeline(StudentPipeline, ImagePipeline):
    """Draws pictures from prompts by a student of LlamaGen, in one call or two.

    Args:
        transformer: the student, one of captions.
        vq_model: turns codes into pictures.
        text_encoder: as for `ImagePipeline`.
        sampler: a `DistilledSampler`.
        default_guidance_scale, default_top_k: of the tokens that the teacher draws.
        teacher: the model that the student learned from, for a sampler with `teacher_from`.

    A call takes what `ImagePipeline` takes. Without a teacher there is no law to change: guidance, temperature, top-k
    and top-p are refused. With `output_type="latent"` its pictures are the codes, [B, d, h, w].

    Raises:
        ValueError: a tokenizer or a teacher of other tokens, or a student or a teacher of classes.

    Example:
        >>> pipe = DistilledTextImagePipeline.from_pretrained("student")
        >>> pipe("a large red circle on a plain sky background").images[0].save("circle.png")
    """

    model_cpu_offload_seq = "text_encoder->teacher->transformer->vq_model"
    _optional_components = ["text_encoder", "teacher"]
    _of_classes = "DistilledImagePipeline"

    @registers
    def __init__(
        self,
        transformer: LlamaGenStudent,
        vq_model: VQModel,
        text_encoder: CaptionEncoder | None,
        sampler: SchedulerMixin,
        default_guidance_scale: float = 3.0,
        default_top_k: int = 0,
        teacher: LlamaGenTransformer | None = None,
    ): ...

    @classmethod
    def from_official(cls, *files: Any, **settings: Any) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Refused: the released students draw classes.

        Raises:
            ValueError: always; names the pipeline that reads them.
        """
        raise ValueError("the released students draw class labels; use DistilledImagePipeline.from_official.")
