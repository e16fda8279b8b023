"""Log-probabilities of tokens that were drawn in other orders than raster: from definitions, one sample at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.order_laws import DEFINITIONS, GUIDED, made, product_law
from tests.helpers.tabular import TabularModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from tests.helpers.tiny import seeded
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.parallel_jacobi import ParallelJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders import rows
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.orders.any_order_speculative import SpeculativeAnyOrderSampler
from visual_spec.samplers.orders.blocks import BlockJacobiSampler
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.zipar import ZipARSampler

PLAIN = TokenLaw()
ANY = TabularAnyOrderModel(TokenGrid(2, 4), 3, conditions=3)
GIVEN = [5, 0, 7, 2, 1, 6, 3, 4]
NEAR: dict[str, Any] = dict(rtol=0, atol=1e-5, check_dtype=False, equal_nan=True)


def drawn(sampler: Any, model: Any, law: TokenLaw, count: int = 5, condition: Any = None, **more: Any) -> Any:
    request: dict[str, Any] = dict(law=law, batch_size=count, output_logprobs=True, **more)
    result = sampler(model, condition, generator=seeded(*range(count)), **request)
    assert result.trace.logprobs_law == "drawn"
    return result


@pytest.mark.parametrize("law", [PLAIN, GUIDED, TokenLaw(temperature=0.7, top_k=2)])
@pytest.mark.parametrize(
    ("name", "grid", "sampler"),
    [
        ("nar", TokenGrid(2, 3), OrderedSampler()),
        ("flashar", TokenGrid(2, 3), OrderedSampler()),
        ("par4", TokenGrid(2, 4), OrderedSampler()),
        ("blocks2", TokenGrid(2, 4), OrderedSampler()),
        ("blocks2", TokenGrid(4, 2), BlockJacobiSampler(3)),
        ("blocks2", TokenGrid(2, 4), BlockJacobiSampler(2, acceptance="exact")),
    ],
    ids=str,
)
def test_trained_orders_and_blocks_give_what_makes_up_the_law_of_the_sample(name, grid, sampler, law):
    model = made(name, grid, 2)
    result = drawn(sampler, model, law, count=12)
    index = (result.tokens * 2 ** torch.arange(grid.num_tokens - 1, -1, -1)).sum(1)
    for found, under in ((result.trace.logprobs, law), (result.trace.model_logprobs, PLAIN)):
        wanted = product_law(model, under, DEFINITIONS[name], under.guided)
        torch.testing.assert_close(found.sum(1), wanted.log()[index], **NEAR)


@pytest.mark.parametrize(
    "known", [None, torch.tensor([[-1, 2, -1, -1, 0, 1, -1, -1], [-1] * 8, [1] + [-1] * 7])]
)
@pytest.mark.parametrize("law", [PLAIN, TokenLaw(guidance_scale=1.7, temperature=0.6, top_k=2)])
@pytest.mark.parametrize(
    "sampler",
    [
        AnyOrderSampler(),
        AnyOrderSampler(GIVEN, guidance_start=1.2),
        AnyOrderSampler(GIVEN, steps=4),
        SpeculativeAnyOrderSampler(3),
        SpeculativeAnyOrderSampler(2, GIVEN, "exact"),
        SpeculativeAnyOrderSampler(3, "halton", guidance_start=1.2),
    ],
)
def test_any_order_gives_each_token_by_what_its_place_saw(sampler, law, known):
    condition = torch.tensor([0, 2, 1])
    more = {} if known is None else {"known_tokens": known}
    result = drawn(sampler, ANY, law, 3, condition, **more)
    tokens, calls = result.tokens, result.trace.commit_call
    slots = torch.arange(8).expand(3, -1)
    if sampler.config.get("steps"):  # of its call, what earlier calls drew
        given = slots.new_zeros(3, 8, dtype=torch.bool) if known is None else known >= 0
        moment = calls.masked_fill(given, -1)
        seen = moment[:, None] < moment[..., None]
    else:
        rank = order_of_places(sampler, known)
        seen = rank[:, None] < rank[..., None]
    state = ANY.prefill(condition, batch_size=3, guided=law.guided, window=8, asked=slots)
    logits = ANY(state, tokens, slots, seen=seen)  # [R, L, V]
    own = logits[:3].log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    start = sampler.config.guidance_start
    if law.guided and start is not None:
        share = (start + (1.7 - start) * seen.sum(-1) / 8) / 1.7
        logits[:3] = logits[3:] + share[..., None] * (logits[:3] - logits[3:])
    under = law(logits, law.guided).gather(-1, tokens[..., None])[..., 0]
    if known is not None:
        own, under = (part.masked_fill(known >= 0, torch.nan) for part in (own, under))
    torch.testing.assert_close(result.trace.model_logprobs, own, **NEAR)
    torch.testing.assert_close(result.trace.logprobs, under, **NEAR)


def order_of_places(sampler: Any, known: Tensor | None) -> Tensor:
    """The place of each slot, long [B, L]: of one token a call the call itself."""
    plain = AnyOrderSampler(sampler.config.order, guidance_start=sampler.config.guidance_start)
    more: dict[str, Any] = {} if known is None else {"known_tokens": known}
    calls = plain(ANY, None, law=PLAIN, generator=seeded(0, 1, 2), batch_size=3, **more).trace.commit_call
    if known is not None:
        calls = calls.masked_fill(known >= 0, -1)
    return calls


@pytest.mark.parametrize(
    "sampler",
    [ZipARSampler(2), ZipARSampler(1, adaptive=True), ParallelJacobiSampler(2, 2), ZipARSampler(9)],
)
@pytest.mark.parametrize("law", [PLAIN, TokenLaw(guidance_scale=2.0, top_k=3, temperature=0.9)])
def test_rows_give_the_laws_that_a_measuring_decode_compares(monkeypatch, sampler, law):
    model = TabularModel(TokenGrid(4, 5), 4, order=7, conditions=2, dependence=0.3)
    used: list[Tensor] = []

    def look(model: Any, condition: Any, tokens: Tensor, laws: Tensor, *rest: Any, **more: Any) -> Tensor:
        used.append(laws.gather(-1, tokens[..., None])[..., 0])
        return torch.zeros(len(tokens))

    labels = torch.tensor([1, 0, 1])
    result = drawn(sampler, model, law, 3, labels)
    monkeypatch.setattr(rows, "raster_divergence", look)
    measuring = type(sampler).from_config(sampler.config, measure=True)
    measuring(model, labels, law=law, generator=seeded(0, 1, 2), batch_size=3)
    torch.testing.assert_close(result.trace.logprobs, used[0], **NEAR)
    if law is PLAIN:
        torch.testing.assert_close(result.trace.model_logprobs, used[0], **NEAR)
