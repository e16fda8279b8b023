"""Text to image by Lumina-DiMOO: prompt -> its template, embedded -> tokens, many at a time -> picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.core.saved import check_folder, fetched
from visual_spec.models.masked.amused import AmusedVQModel
from visual_spec.models.masked.dimoo import DimooTransformer
from visual_spec.models.masked.dimoo_checkpoint import LAYOUT, is_dimoo, load_dimoo
from visual_spec.models.text.prompt_embeddings import PromptEmbeddings
from visual_spec.pipelines.components import registers
from visual_spec.pipelines.decoders import AmusedDecoder
from visual_spec.pipelines.embedded import INDEX, local_folder
from visual_spec.pipelines.masked_image import MaskedImagePipeline
from visual_spec.pipelines.saved_index import read_index_file
from visual_spec.samplers.masked.presets import PRESETS

DIFFUSERS_CLASS = "LuminaDiMOOPipeline"
_FILES = ["*.json", "model*.safetensors", "vqvae/*"]


class DimooImagePipeline(MaskedImagePipeline):
    """Draws pictures from prompts by Lumina-DiMOO, whole or into a picture that is given.

    `from_pretrained` also takes the official folder, or its Hub id.

    Args:
        transformer, vq_model: the layers of the language model, and its tokenizer of pictures, which is aMUSEd's.
        text_encoder: puts prompts into the template, and embeds them. None: pass `prompt_embeds`.
        sampler: a `MaskedSampler`, or a `SpeculativeMaskedSampler` for the law of one token a call.
        default_guidance_scale, default_top_k: what `__call__` takes where none is passed; saved with the pipeline.
        shortcut: stands in for the transformer on some calls of a `ReusingMaskedSampler(reuse_by="shortcut")`.

    Raises:
        ValueError: tokenizer and transformer that do not fit.

    Example:
        >>> pipe = DimooImagePipeline.from_official("Alpha-VLLM/Lumina-DiMOO", dtype=torch.bfloat16).to("cuda")
        >>> pipe("a bench by the sea", height=768, width=1536).images[0].save("bench.png")
    """

    model_cpu_offload_seq = "text_encoder->transformer->shortcut->vq_model"
    _optional_components = ["text_encoder", "shortcut"]
    _decoder = AmusedDecoder
    causal_layer = None

    @registers
    def __init__(
        self,
        transformer: DimooTransformer | None,
        vq_model: AmusedVQModel | None,
        text_encoder: PromptEmbeddings | None,
        sampler: SchedulerMixin | None,
        default_guidance_scale: float = 5.0,
        default_top_k: int = 0,
        shortcut: ModelMixin | None = None,
    ): ...

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> Self:
        """Load a folder or a Hub id: ours, or the official one.

        Args:
            kwargs: as for diffusers; of the latter `dtype`.

        Raises:
            ValueError, OSError: as `VisualPipeline.from_pretrained` and `from_official`.
        """
        name = pretrained_model_name_or_path
        folder = local_folder(name) or Path(fetched(os.fspath(name), [INDEX], kwargs))
        if (folder / INDEX).is_file() and read_index_file(folder)["_class_name"] != DIFFUSERS_CLASS:
            return super().from_pretrained(name, **kwargs)
        return cls.from_official(name, dtype=kwargs.get("dtype") or kwargs.get("torch_dtype"))

    @classmethod
    def from_official(
        cls,
        folder: str | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        sampler: SchedulerMixin | None = None,
    ) -> Self:
        """A pipeline of the official folder, with the published 64 calls and guidance 5 (`cfg_scale` 4 there).

        Args:
            folder: of Alpha-VLLM/Lumina-DiMOO, or its Hub id.
            dtype: of the language model; None keeps the files' own. What makes pictures of tokens keeps its own, as in
                the release.
            sampler: default: `PRESETS["dimoo"]`.

        Raises:
            ValueError, OSError: a folder that is none of these; says what is missing.
        """
        home = local_folder(folder) or Path(fetched(os.fspath(folder), _FILES, {}))
        if not is_dimoo(home):
            raise ValueError(
                f"{home} is no Lumina-DiMOO: no config.json of a llada, or no vqvae; pass {LAYOUT.file}."
            )
        model, reader = load_dimoo(home, dtype=dtype)
        check_folder(home / "vqvae", AmusedVQModel)
        vq_model = AmusedVQModel.from_pretrained(home, subfolder="vqvae")
        return cls(model, vq_model.eval(), reader, sampler or PRESETS["dimoo"].sampler())


def assemble(
    sources: Sequence[Path | Checkpoint], dtype: torch.dtype | None
) -> tuple[DimooImagePipeline, dict[str, str]]:
    """The pipeline of an official folder, for `visual-spec convert`, and what the folder is.

    Raises:
        ValueError: something besides the folder.
    """
    if len(sources) != 1:
        raise ValueError(
            f"{sources[0]} is Lumina-DiMOO, whose folder holds all that it needs; pass it alone."
        )
    folder: Any = sources[0]
    return DimooImagePipeline.from_official(folder, dtype=dtype), {str(folder): "Lumina-DiMOO"}
