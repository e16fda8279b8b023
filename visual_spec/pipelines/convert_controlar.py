"""Official files of ControlAR, for `visual-spec convert`, beside LlamaGen's tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_token.controlar import is_controlar, load_controlar_checkpoint
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.image import ImagePipeline


def is_of_controlar(source: Path | Checkpoint) -> bool:
    """Whether a file is a ControlAR."""
    return isinstance(source, Checkpoint) and is_controlar(source.weights)


def assemble_controlar(
    sources: Sequence[Path | Checkpoint], text_encoder: Any, image_size: int | None, dtype: torch.dtype | None
) -> tuple[Any, dict[str, str]]:
    """The pipeline or model of the files, and what each of them is.

    Args:
        sources: at least one of them `is_of_controlar`.

    Raises:
        ValueError: two files of one kind, one that is neither of ControlAR nor LlamaGen's tokenizer, or a text encoder
            for a model alone.
    """
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    models = [one for one in checkpoints if is_controlar(one.weights)]
    tokenizers = [one for one in checkpoints if not is_controlar(one.weights)]
    for several in (models, tokenizers):
        if len(several) > 1:
            raise ValueError(
                f"{several[0].path} and {several[1].path} are both of one kind; pass one ControlAR and one tokenizer."
            )
    names = {str(models[0].path): "ControlAR"}
    if not tokenizers:
        if text_encoder is not None:
            raise ValueError("a text encoder belongs into a pipeline; pass a ControlAR and its tokenizer.")
        return load_controlar_checkpoint(models[0], image_size=image_size, dtype=dtype), names
    found = recognise(tokenizers[0])
    if found.model is not VQModel:
        raise ValueError(
            f"{tokenizers[0].path} is {found.name}, and {models[0].path} is ControlAR; pass LlamaGen's vq_ds16_t2i.pt."
        )
    names[str(tokenizers[0].path)] = found.name
    pipe = ImagePipeline.from_official(
        models[0], tokenizers[0], text_encoder, image_size=image_size, dtype=dtype
    )
    return pipe, names
