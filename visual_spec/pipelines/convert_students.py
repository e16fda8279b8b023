"""Official files of students, for `visual-spec convert`: those of Distilled Decoding, beside LlamaGen's."""

from collections.abc import Sequence
from typing import Any

import torch

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.models.next_token.llamagen_student import is_llamagen_student, load_llamagen_student
from visual_spec.pipelines.distilled_image import DistilledImagePipeline


def is_student(checkpoint: Checkpoint) -> bool:
    """Whether a file is of a student; its tokenizer and its teacher are of LlamaGen."""
    return is_llamagen_student(checkpoint.weights)


def assemble_students(
    checkpoints: Sequence[Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of the files, and what each of them is.

    Args:
        checkpoints: at least one of them `is_student`.

    Raises:
        ValueError: files of another family or two of one kind, a teacher without a tokenizer, or a text encoder, which
            no student reads.
    """
    if text_encoder is not None:
        raise ValueError("students of LlamaGen draw from class labels; leave the text encoder out.")
    students = [one for one in checkpoints if is_student(one)]
    names = {str(one.path): "LlamaGen's student" for one in students}
    teachers, tokenizers = [], []
    for one in (one for one in checkpoints if not is_student(one)):
        found = recognise(one)
        names[str(one.path)] = found.name
        (teachers if found.model is LlamaGenTransformer else tokenizers).append(one)
    for several in (students, teachers, tokenizers):
        if len(several) > 1:
            raise ValueError(
                f"{several[0].path} and {several[1].path} are both of one kind; pass one student, one tokenizer, and "
                "the LlamaGen that taught it, or some of them."
            )
    if teachers and not tokenizers:
        raise ValueError(
            f"{students[0].path} and {teachers[0].path} given without their tokenizer; pass vq_ds16_c2i.pt too."
        )
    if not tokenizers:
        model: Any = load_llamagen_student(students[0], dtype=dtype)
        side = 16 * model.grid.width
    else:
        model = DistilledImagePipeline.from_official(
            students[0], tokenizers[0], teacher=teachers[0] if teachers else None, dtype=dtype
        )
        side = model.image_size[0]
    if image_size not in (None, side):
        raise ValueError(
            f"image_size={image_size} given, but {students[0].path} draws {side} pixels; leave it out."
        )
    return model, names
