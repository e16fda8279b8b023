"""Official files of MaskGCT, for `visual-spec convert`: seven of them make one pipeline, two of them one codec."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers.models.modeling_utils import ModelMixin

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.masked.maskgct_checkpoint import kind_of
from visual_spec.pipelines.maskgct import MaskgctPipeline, load_parts, published_samplers

_NEEDED = (
    "semantic network",
    "first acoustic network",
    "acoustic network",
    "acoustic encoder",
    "acoustic decoder",
)


def is_of_maskgct(source: Path | Checkpoint) -> bool:
    """Whether a file is one of MaskGCT's."""
    return isinstance(source, Checkpoint) and kind_of(source) is not None


def assemble(
    sources: Sequence[Path | Checkpoint], dtype: torch.dtype | None
) -> tuple[MaskgctPipeline | ModelMixin, dict[str, str]]:
    """The pipeline or model of the files, and what each of them is.

    Raises:
        ValueError: files of another family or two of one kind, a codec without its other half, or neither all files nor
            the files of one model.
    """
    checkpoints = [source for source in sources if isinstance(source, Checkpoint)]
    by_kind: dict[str, Checkpoint] = {}
    for one in checkpoints:
        kind = kind_of(one)
        if kind is None:
            raise ValueError(f"{one.path} is not of MaskGCT, and other files are; pass files of one family.")
        if kind == "acoustic network" and len(one.weights["layer_emb.weight"]) == 1:
            kind = "first acoustic network"
        if kind in by_kind:
            raise ValueError(
                f"{by_kind[kind].path} and {one.path} are both MaskGCT's {kind}; pass one of them."
            )
        by_kind[kind] = one
    names = {str(one.path): f"MaskGCT's {kind}" for kind, one in by_kind.items()}
    loaded = load_parts(by_kind, dtype=dtype)
    if {*_NEEDED} <= {*by_kind}:
        return MaskgctPipeline(**loaded, **published_samplers()), names
    if len(loaded) == 1:
        return loaded.popitem()[1], names
    missing = [kind for kind in _NEEDED if kind not in by_kind]
    raise ValueError(
        f"these files of MaskGCT lack its {', '.join(missing)}; pass all, or the files of one model."
    )
