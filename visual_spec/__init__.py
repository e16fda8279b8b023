"""visual_spec: exact, fast decoding for autoregressive image, video and audio generators.

Importing this package loads nothing else: names are resolved at first use (PEP 562), so `import visual_spec` and
`visual-spec --help` do not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from visual_spec.samplers.registry import SAMPLERS

if TYPE_CHECKING:  # for editors; what is offered is `_HOME`
    from visual_spec.models.core.projections import fuse_projections
    from visual_spec.models.core.protocol import TokenGrid
    from visual_spec.pipelines.accelerate import accelerate, restore, summary
    from visual_spec.pipelines.amused_image import AmusedImagePipeline
    from visual_spec.pipelines.audio import AudioPipeline
    from visual_spec.pipelines.chunk_video import ChunkVideoPipeline
    from visual_spec.pipelines.class_image import ClassImagePipeline
    from visual_spec.pipelines.distilled_image import DistilledImagePipeline, DistilledTextImagePipeline
    from visual_spec.pipelines.distilled_scales import DistilledScalePipeline
    from visual_spec.pipelines.image import ImagePipeline
    from visual_spec.pipelines.infinity import InfinityPipeline
    from visual_spec.pipelines.latent_image import LatentImagePipeline
    from visual_spec.pipelines.mage_image import MageImagePipeline
    from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline
    from visual_spec.pipelines.masked_image import MaskedImagePipeline
    from visual_spec.pipelines.maskgct import MaskgctPipeline
    from visual_spec.pipelines.scale_image import ScaleImagePipeline
    from visual_spec.pipelines.transformers_generate import custom_generate, save_custom_generate
    from visual_spec.pipelines.video import VideoPipeline
    from visual_spec.samplers.any_order import AnyOrderSampler
    from visual_spec.samplers.any_order_speculative import SpeculativeAnyOrderSampler
    from visual_spec.samplers.autoregressive import AutoregressiveSampler
    from visual_spec.samplers.columns import ColumnAutoregressiveSampler
    from visual_spec.samplers.columns_jacobi import ColumnJacobiSampler
    from visual_spec.samplers.continuous import ContinuousSampler
    from visual_spec.samplers.continuous_drafted import SpeculativeContinuousSampler
    from visual_spec.samplers.continuous_head import HeadSpeculativeSampler
    from visual_spec.samplers.continuous_jacobi import ContinuousJacobiSampler
    from visual_spec.samplers.core.law import TokenLaw
    from visual_spec.samplers.distilled import DistilledSampler
    from visual_spec.samplers.drafted import DraftedSampler
    from visual_spec.samplers.frames import FrameMaskedSampler
    from visual_spec.samplers.jacobi import SpeculativeJacobiSampler
    from visual_spec.samplers.masked import MaskedSampler
    from visual_spec.samplers.masked_self_speculative import SelfSpeculativeMaskedSampler
    from visual_spec.samplers.masked_speculative import SpeculativeMaskedSampler
    from visual_spec.samplers.mulo import MultiscaleSampler
    from visual_spec.samplers.ordered import OrderedSampler
    from visual_spec.samplers.parallel_jacobi import ParallelJacobiSampler
    from visual_spec.samplers.proactive import ProactiveJacobiSampler
    from visual_spec.samplers.scales import ScaleWiseSampler, Stage, code_stages
    from visual_spec.samplers.tree import TreeSampler
    from visual_spec.samplers.zipar import ZipARSampler

__version__ = "0.1.0"

_HOME = {entry.class_name: entry.module for entry in SAMPLERS} | {
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
    "Stage": "visual_spec.samplers.scales",
    "TokenGrid": "visual_spec.models.core.protocol",
    "TokenLaw": "visual_spec.samplers.core.law",
    "VideoPipeline": "visual_spec.pipelines.video",
    "accelerate": "visual_spec.pipelines.accelerate",
    "code_stages": "visual_spec.samplers.scales",
    "custom_generate": "visual_spec.pipelines.transformers_generate",
    "fuse_projections": "visual_spec.models.core.projections",
    "restore": "visual_spec.pipelines.accelerate",
    "save_custom_generate": "visual_spec.pipelines.transformers_generate",
    "summary": "visual_spec.pipelines.accelerate",
}

__all__ = [*sorted(_HOME), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'visual_spec' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
