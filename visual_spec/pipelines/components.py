"""Where the classes live that a saved pipeline names. Plain data, no PyTorch.

diffusers finds the class of a saved component in the module that model_index.json records, if that module was imported
before and also holds the component's base class. So a pipeline would have to import everything that any saved pipeline
may name, and a folder could not be loaded once a module moves. `resolved` therefore sends diffusers to this module,
whose attributes are our classes by name, each imported when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from visual_spec.samplers import registry

_MODELS = "visual_spec.models"
COMPONENTS = {  # beside the samplers, which their registry names
    "AcousticCodec": f"{_MODELS}.masked.maskgct_codec",
    "AcousticNetwork": f"{_MODELS}.masked.maskgct",
    "AmusedTransformer": f"{_MODELS}.masked.amused",
    "AmusedVQModel": f"{_MODELS}.masked.amused",
    "BitwiseVQModel": f"{_MODELS}.next_scale.infinity_vq",
    "CausalLayer": f"{_MODELS}.masked.causal_layer",
    "CausalLatentTransformer": f"{_MODELS}.continuous.causal",
    "CaptionEncoder": f"{_MODELS}.text.caption_encoder",
    "ColumnEagleDrafter": f"{_MODELS}.drafters.column_eagle",
    "ControlARTransformer": f"{_MODELS}.next_token.controlar",
    "EagleDrafter": f"{_MODELS}.drafters.eagle",
    "FeatureShortcut": f"{_MODELS}.masked.shortcut",
    "FrameMaskedTransformer": f"{_MODELS}.masked.frames",
    "InfinityTransformer": f"{_MODELS}.next_scale.infinity",
    "LlamaGenStudent": f"{_MODELS}.next_token.llamagen_student",
    "LlamaGenTransformer": f"{_MODELS}.next_token.llamagen",
    "MARTransformer": f"{_MODELS}.continuous.mar",
    "MageTransformer": f"{_MODELS}.masked.mage",
    "MageVQModel": f"{_MODELS}.masked.mage_vq",
    "MaskedImageTransformer": f"{_MODELS}.masked.maskgit",
    "MultiscaleDrafter": f"{_MODELS}.drafters.mulo",
    "MultiscaleVQModel": f"{_MODELS}.next_scale.var_vq",
    "SemanticCodec": f"{_MODELS}.masked.maskgct_codec",
    "SemanticNetwork": f"{_MODELS}.masked.maskgct",
    "T5Features": f"{_MODELS}.text.t5_features",
    "VARStudent": f"{_MODELS}.next_scale.var_student",
    "VARTransformer": f"{_MODELS}.next_scale.var",
    "VQModel": f"{_MODELS}.next_token.llamagen_vq",
}

PIPELINES = {
    "AmusedImagePipeline": "visual_spec.pipelines.amused_image",
    "AudioPipeline": "visual_spec.pipelines.audio",
    "ChunkVideoPipeline": "visual_spec.pipelines.chunk_video",
    "ClassImagePipeline": "visual_spec.pipelines.class_image",
    "DistilledImagePipeline": "visual_spec.pipelines.distilled_image",
    "DistilledScalePipeline": "visual_spec.pipelines.distilled_scales",
    "DistilledTextImagePipeline": "visual_spec.pipelines.distilled_image",
    "ImagePipeline": "visual_spec.pipelines.image",
    "InfinityPipeline": "visual_spec.pipelines.infinity",
    "LatentImagePipeline": "visual_spec.pipelines.latent_image",
    "MageImagePipeline": "visual_spec.pipelines.mage_image",
    "MaskedClassImagePipeline": "visual_spec.pipelines.masked_class_image",
    "MaskedImagePipeline": "visual_spec.pipelines.masked_image",
    "MaskgctPipeline": "visual_spec.pipelines.maskgct",
    "ScaleImagePipeline": "visual_spec.pipelines.scale_image",
    "VideoPipeline": "visual_spec.pipelines.video",
}

# By these diffusers tells how a component is loaded.
_BASES = {
    "ModelMixin": "diffusers.models.modeling_utils",
    "SchedulerMixin": "diffusers.schedulers.scheduling_utils",
}


def resolved(index: Mapping[str, Any]) -> dict[str, Any]:
    """What model_index.json says, with our classes found by name, whatever module they lived in when it was saved.

    The class of the pipeline is its name alone; diffusers reads the pair ["pipeline", name].
    """
    found = {name: [__name__, value[1]] if _is_ours(value) else value for name, value in index.items()}
    kind = index.get("_class_name")
    return found | {"_class_name": kind[-1]} if isinstance(kind, list | tuple) and kind else found


def _is_ours(value: Any) -> bool:
    pair = (
        isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)
    )
    return pair and value[0].startswith("visual_spec.") and value[1] in COMPONENTS | _samplers()


def _samplers() -> dict[str, str]:
    return {entry.class_name: entry.module for entry in registry.SAMPLERS}


def __getattr__(name: str) -> Any:
    homes = COMPONENTS | _samplers() | PIPELINES | _BASES
    if name not in homes:
        raise AttributeError(
            f"{name!r} is no class that a saved pipeline names; those are {', '.join(homes)}"
        )
    return getattr(importlib.import_module(homes[name]), name)
