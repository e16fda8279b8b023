# Written by scripts/write_stub.py.
# fmt: off
from visual_spec.models.core.projections import fuse_projections as fuse_projections
from visual_spec.models.core.protocol import TokenGrid as TokenGrid
from visual_spec.pipelines.accelerate import accelerate as accelerate
from visual_spec.pipelines.accelerate import restore as restore
from visual_spec.pipelines.accelerate import summary as summary
from visual_spec.pipelines.amused_image import AmusedImagePipeline as AmusedImagePipeline
from visual_spec.pipelines.audio import AudioPipeline as AudioPipeline
from visual_spec.pipelines.base import VisualPipeline as VisualPipeline
from visual_spec.pipelines.bitdance_image import BitDanceImagePipeline as BitDanceImagePipeline
from visual_spec.pipelines.chunk_video import ChunkVideoPipeline as ChunkVideoPipeline
from visual_spec.pipelines.class_image import ClassImagePipeline as ClassImagePipeline
from visual_spec.pipelines.continuous_image import ContinuousImagePipeline as ContinuousImagePipeline
from visual_spec.pipelines.dimoo_image import DimooImagePipeline as DimooImagePipeline
from visual_spec.pipelines.image import ImagePipeline as ImagePipeline
from visual_spec.pipelines.infinity import InfinityPipeline as InfinityPipeline
from visual_spec.pipelines.loading import load_pipeline as load_pipeline
from visual_spec.pipelines.mage_image import MageImagePipeline as MageImagePipeline
from visual_spec.pipelines.masked_class_image import MaskedClassImagePipeline as MaskedClassImagePipeline
from visual_spec.pipelines.masked_image import MaskedImagePipeline as MaskedImagePipeline
from visual_spec.pipelines.maskgct import MaskgctPipeline as MaskgctPipeline
from visual_spec.pipelines.output import AudioPipelineOutput as AudioPipelineOutput
from visual_spec.pipelines.output import ImagePipelineOutput as ImagePipelineOutput
from visual_spec.pipelines.output import VideoPipelineOutput as VideoPipelineOutput
from visual_spec.pipelines.scale_image import ScaleImagePipeline as ScaleImagePipeline
from visual_spec.pipelines.transformers_generate import custom_generate as custom_generate
from visual_spec.pipelines.transformers_generate import save_custom_generate as save_custom_generate
from visual_spec.pipelines.video import VideoPipeline as VideoPipeline
from visual_spec.prototype.acdit.sampler import BlockDiffusionSampler as BlockDiffusionSampler
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler as BlockDraftSampler
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler as DraftedColumnSampler
from visual_spec.prototype.flowar.sampler import FlowScaleSampler as FlowScaleSampler
from visual_spec.prototype.freedave import FreeDaveSampler as FreeDaveSampler
from visual_spec.prototype.local_speculation.sampler import MultiscaleSampler as MultiscaleSampler
from visual_spec.prototype.parallel_jacobi import ParallelJacobiSampler as ParallelJacobiSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler as ProactiveJacobiSampler
from visual_spec.prototype.reuse.continuous import ReusingContinuousSampler as ReusingContinuousSampler
from visual_spec.prototype.reuse.masked import ReusingMaskedSampler as ReusingMaskedSampler
from visual_spec.prototype.self_speculative.sampler import SelfSpeculativeMaskedSampler as SelfSpeculativeMaskedSampler
from visual_spec.prototype.students.image_pipelines import DistilledImagePipeline as DistilledImagePipeline
from visual_spec.prototype.students.image_pipelines import DistilledTextImagePipeline as DistilledTextImagePipeline
from visual_spec.prototype.students.sampler import DistilledSampler as DistilledSampler
from visual_spec.prototype.students.scale_pipeline import DistilledScalePipeline as DistilledScalePipeline
from visual_spec.samplers.continuous.chunks import ChunkWiseSampler as ChunkWiseSampler
from visual_spec.samplers.continuous.continuous import ContinuousSampler as ContinuousSampler
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler as SpeculativeContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler as HeadSpeculativeSampler
from visual_spec.samplers.continuous.jacobi import ContinuousJacobiSampler as ContinuousJacobiSampler
from visual_spec.samplers.core.law import TokenLaw as TokenLaw
from visual_spec.samplers.core.noise import CounterNoise as CounterNoise
from visual_spec.samplers.core.trace import DecodeTrace as DecodeTrace
from visual_spec.samplers.core.trace import SampleResult as SampleResult
from visual_spec.samplers.masked.frames import FrameMaskedSampler as FrameMaskedSampler
from visual_spec.samplers.masked.masked import MaskedSampler as MaskedSampler
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler as SpeculativeMaskedSampler
from visual_spec.samplers.orders.any_order import AnyOrderSampler as AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler as SpeculativeAnyOrderSampler
from visual_spec.samplers.orders.blocks import BlockJacobiSampler as BlockJacobiSampler
from visual_spec.samplers.orders.ordered import OrderedSampler as OrderedSampler
from visual_spec.samplers.orders.zipar import ZipARSampler as ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler as AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler as ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler as ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler as DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler as SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler as TreeSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler as ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage as Stage
from visual_spec.samplers.scales.stages import code_stages as code_stages

LatentImagePipeline = ContinuousImagePipeline
HOMES: dict[str, str]
__version__: str
__all__ = [
    "AmusedImagePipeline",
    "AnyOrderSampler",
    "AudioPipeline",
    "AudioPipelineOutput",
    "AutoregressiveSampler",
    "BitDanceImagePipeline",
    "BlockJacobiSampler",
    "ChunkVideoPipeline",
    "ChunkWiseSampler",
    "ClassImagePipeline",
    "ColumnAutoregressiveSampler",
    "ColumnJacobiSampler",
    "ContinuousImagePipeline",
    "ContinuousJacobiSampler",
    "ContinuousSampler",
    "CounterNoise",
    "DecodeTrace",
    "DimooImagePipeline",
    "DraftedSampler",
    "FrameMaskedSampler",
    "HeadSpeculativeSampler",
    "ImagePipeline",
    "ImagePipelineOutput",
    "InfinityPipeline",
    "MageImagePipeline",
    "MaskedClassImagePipeline",
    "MaskedImagePipeline",
    "MaskedSampler",
    "MaskgctPipeline",
    "OrderedSampler",
    "SampleResult",
    "ScaleImagePipeline",
    "ScaleWiseSampler",
    "SpeculativeAnyOrderSampler",
    "SpeculativeContinuousSampler",
    "SpeculativeJacobiSampler",
    "SpeculativeMaskedSampler",
    "Stage",
    "TokenGrid",
    "TokenLaw",
    "TreeSampler",
    "VideoPipeline",
    "VideoPipelineOutput",
    "VisualPipeline",
    "ZipARSampler",
    "accelerate",
    "code_stages",
    "custom_generate",
    "fuse_projections",
    "load_pipeline",
    "restore",
    "save_custom_generate",
    "summary",
]
