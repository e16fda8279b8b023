"""Calls that a type checker must refuse: `make lint` fails where one of them is no error any more.

Constructors are decorated (`register_to_config`, `registers`); a decorator that loses their signature loses this.
A sampler names the protocol of the models that it decodes (`Sampler[NextTokenModel, State]`).
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler


def wrong_calls() -> None:
    SpeculativeJacobiSampler(windw=3)  # pyright: ignore[reportCallIssue]
    SpeculativeJacobiSampler(coupling=17)  # pyright: ignore[reportArgumentType]
    VQModel(codebook_size="many")  # pyright: ignore[reportArgumentType]
    ImagePipeline(transformr=None)  # pyright: ignore[reportCallIssue]


def wrong_models(
    tokenizer: VQModel, transformer: LlamaGenTransformer, masked: MaskedImageTransformer
) -> None:
    law = TokenLaw()
    SpeculativeJacobiSampler()(transformer, None, law=law)
    SpeculativeJacobiSampler()(tokenizer, None, law=law)  # pyright: ignore[reportArgumentType]
    SpeculativeJacobiSampler()(masked, None, law=law)  # pyright: ignore[reportArgumentType]
    MaskedSampler()(masked, None, law=law)
    MaskedSampler()(transformer, None, law=law)  # pyright: ignore[reportArgumentType]
