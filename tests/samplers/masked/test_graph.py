"""Calls of masked models recorded as CUDA graphs. Without a GPU, traced operations stand in for a recording."""

from typing import Any

import pytest
import torch

from tests.helpers.masked_reuse import made
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularMaskedModel
from tests.helpers.tiny import seeded
from tests.models.masked import maskgct_straight as straight
from tests.models.masked.maskgct_straight import DIM, HEADS, LAYERS, PHONES, SEMANTIC
from visual_spec.models.core import cache
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.models.masked.maskgct import SemanticCondition, SemanticDecoder, SemanticNetwork
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked import masked
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.presets import PRESETS


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    """As if the models were where graphs are recorded."""
    monkeypatch.setattr(masked, "wants_graph", lambda graph, model: graph is not False)
    monkeypatch.setattr(cache, "common_run", lambda slots: None)  # which looks at values on a CPU only


def law_of(kind: str) -> TokenLaw:
    return TokenLaw(guidance_scale=1.0 if kind == "mage" else 2.0)


def decoded(kind: str, **settings: Any) -> Any:
    model, condition, _ = made(kind)
    sampler = of_settings(MaskedSampler, **{"steps": 6, "choice_temperature": 1.0, **settings})
    return sampler(model, condition, law=law_of(kind), generator=seeded(0, 1), batch_size=2)


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize(("kind", "count"), [("captions", 1), ("mage", 1), ("magnet", 4)])
def test_replayed_calls_give_the_same_tokens(kind, count, on_gpu, recordings):  # noqa: F811
    plain, found = decoded(kind), decoded(kind, graph=True)
    assert torch.equal(found.tokens, plain.tokens)
    assert len(recordings) == count  # one for each codebook
    assert torch.equal(found.trace.entry_call, plain.trace.entry_call)


def test_a_replayed_call_reads_the_time_of_its_step(on_gpu, recordings):  # noqa: F811
    network = SemanticNetwork(SEMANTIC, DIM, LAYERS, HEADS, PHONES + 1)
    weights = straight.random_weights(straight.semantic_shapes(), 0)
    network.load_state_dict(weights)
    model = SemanticDecoder(network.double().eval(), 20)
    condition = SemanticCondition([torch.tensor([1, 2, 3])] * 2, [torch.tensor([5, 6])] * 2, [20, 20])
    settings = PRESETS["maskgct"].settings | {"steps": 6}
    plain, found = (
        of_settings(MaskedSampler, **settings, graph=graph)(
            model, condition, law=TokenLaw(temperature=0.9, top_k=6), generator=seeded(0, 1), batch_size=2
        )
        for graph in (False, True)
    )
    assert torch.equal(found.tokens, plain.tokens) and len(recordings) == 1


def test_a_graph_that_cannot_be_is_refused():
    model = TabularMaskedModel(TokenGrid(1, 4), 3)
    with pytest.raises(ValueError, match="graph=True.*CUDA"):
        MaskedSampler(graph=True)(model, None, law=TokenLaw())
    refuses(ValueError, "graph='no'", MaskedSampler, graph="no")
    tokens = [
        MaskedSampler(graph=graph)(model, None, law=TokenLaw(), generator=seeded(1)).tokens
        for graph in ("auto", False)
    ]
    assert torch.equal(*tokens)
