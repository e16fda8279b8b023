"""A target and a draft model of few tokens, and the exact law of what drafting with them returns."""

from typing import Any

from tests.exactness.enumeration import Enumeration, Enumerator
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.tree import TreeSampler

LAWS = {
    "guidance": TokenLaw(guidance_scale=2.5),
    "top-k": TokenLaw(top_k=2),
    "top-p": TokenLaw(top_p=0.8),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9, guidance_until=2),
}


def three_tokens(height: int = 2, width: int = 2, **changes) -> TabularModel:
    return TabularModel(TokenGrid(height, width), 3, **changes)


def pair(
    seed: int = 0, width: int = 2, height: int = 2, vocab_size: int = 3
) -> tuple[TabularModel, TabularModel]:
    """A target, and a drafter that is about half right."""
    grid = TokenGrid(height, width)
    model, other = (TabularModel(grid, vocab_size, seed=seed + shift) for shift in (0, 100))
    other.logits = 0.6 * model.logits + 0.6 * other.logits
    return model, other


Networks = tuple[TabularModel, TabularModel]


def chain(networks: Networks, law: TokenLaw, *settings: Any, parts: Any = None, **more: Any) -> Enumeration:
    """The law of `DraftedSampler(*settings, **more)`; parts: of the enumerator."""
    model, drafter = networks
    return Enumerator(DraftedSampler(*settings, **more), model, law, drafter=drafter, **parts or {}).run()


def branches(networks: Networks, law: TokenLaw, parts: Any = None, **settings: Any) -> Enumeration:
    """The law of `TreeSampler(**settings)`, of a tree that has siblings; parts: of the enumerator."""
    model, drafter = networks
    sampler = TreeSampler(**{"expected_acceptance": 0.3, **settings})
    return Enumerator(sampler, model, law, drafter=drafter, **parts or {}).run()
