"""Official files of students, for `visual-spec convert`: those of Distilled Decoding, beside LlamaGen's or VAR's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_scale.var_student import is_var_student, load_var_student, unpack_var_student
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.models.next_token.llamagen_student import (
    is_llamagen_student,
    load_llamagen_student,
    unpack_student,
)
from visual_spec.pipelines.distilled_image import DistilledImagePipeline
from visual_spec.pipelines.distilled_scales import DistilledScalePipeline


def is_student(checkpoint: Path | Checkpoint) -> bool:
    """Whether a file is of a student; its tokenizer and its teacher are of LlamaGen, or of VAR."""
    if isinstance(checkpoint, Path):
        return False
    return is_llamagen_student(checkpoint.weights) or is_var_student(checkpoint.weights)


def read_student(path: Path, content: Any) -> Checkpoint | None:
    """The averaged weights in the content of a file of a student; None: it is another file."""
    return unpack_student(path, content) or unpack_var_student(path, content)


def assemble_students(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of the files, and what each of them is.

    Args:
        sources: at least one of them `is_student`.

    Raises:
        ValueError: files of another family or two of one kind, a teacher without a tokenizer, or a text encoder, which
            no student reads.
    """
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    of_var = any(is_var_student(one.weights) for one in checkpoints)
    family, tokenizer_file = ("VAR", "vae_ch160v4096z32.pth") if of_var else ("LlamaGen", "vq_ds16_c2i.pt")
    if text_encoder is not None:
        raise ValueError(f"students of {family} draw from class labels; leave the text encoder out.")
    students = [one for one in checkpoints if is_student(one)]
    names = {str(one.path): f"{family}'s student" for one in students}
    teachers, tokenizers = [], []
    for one in (one for one in checkpoints if not is_student(one)):
        kind, names[str(one.path)] = _kind_of_var(one) if of_var else _kind_of_llamagen(one)
        (teachers if kind == "teacher" else tokenizers).append(one)
    for several in (students, teachers, tokenizers):
        if len(several) > 1:
            raise ValueError(
                f"{several[0].path} and {several[1].path} are both of one kind; pass one student, one tokenizer, and "
                f"the {family} that taught it, or some of them."
            )
    if teachers and not tokenizers:
        raise ValueError(
            f"{students[0].path} and {teachers[0].path} given without their tokenizer; pass {tokenizer_file} too."
        )
    if not tokenizers:
        load: Any = load_var_student if of_var else load_llamagen_student
        model: Any = load(students[0], dtype=dtype)
        side = 16 * (model.scales[-1] if of_var else model.grid.width)
    else:
        make: Any = DistilledScalePipeline if of_var else DistilledImagePipeline
        tokenizer = tokenizers[0].path if of_var else tokenizers[0]
        teacher = teachers[0] if teachers else None
        model = make.from_official(students[0], tokenizer, teacher=teacher, dtype=dtype)
        side = model.image_size[0]
    if image_size not in (None, side):
        raise ValueError(
            f"image_size={image_size} given, but {students[0].path} draws {side} pixels; leave it out."
        )
    return model, names


def _kind_of_llamagen(checkpoint: Checkpoint) -> tuple[str, str]:
    found = recognise(checkpoint)
    return "teacher" if found.model is LlamaGenTransformer else "tokenizer", found.name


def _kind_of_var(checkpoint: Checkpoint) -> tuple[str, str]:
    if "pos_1LC" in checkpoint.weights:
        return "teacher", "VAR"
    if any(key.startswith("quantize.quant_resi.") for key in checkpoint.weights):
        return "tokenizer", "VAR's tokenizer"
    raise ValueError(f"{checkpoint.path} is not of VAR, and the student is; pass files of one family.")
