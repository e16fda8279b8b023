"""`OrderedSampler`: what it equals, what it refuses, what it reports. Laws: tests/exactness/test_order_laws.py."""

from typing import Any

import pytest
import torch

from tests.helpers.llamagen import make, text_condition
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel, TabularOrderModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.parallel_jacobi import ParallelJacobiSampler
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.orders.tables import order_of
from visual_spec.samplers.orders.zipar import ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PLAIN, GUIDED = TokenLaw(), TokenLaw(guidance_scale=2.0, top_k=3, temperature=0.9)
RASTER = TabularModel(TokenGrid(4, 5), 4, order=7, conditions=2, dependence=0.3)
LABELS = torch.tensor([1, 0, 1])
LLAMAGEN = make(grid_size=4, vocab_size=6)
CAPTIONS = text_condition(3, [3, 5, 1])
MODELS = [
    pytest.param(RASTER, LABELS, PLAIN, id="tabular"),
    pytest.param(RASTER, LABELS, GUIDED, id="tabular-guided"),
    pytest.param(LLAMAGEN, CAPTIONS, GUIDED, id="llamagen-guided"),
]
NAR = TabularOrderModel(TokenGrid(2, 3), 3, "nar", heads=2, conditions=2)
PAR = TabularOrderModel(TokenGrid(2, 4), 2, "par4", learned=3, conditions=2)
ANY_ORDER = dict(allow_approximate=True)


def decode(sampler: Any, model: Any = RASTER, condition: Any = LABELS, law: TokenLaw = PLAIN, **options: Any):
    options = {"batch_size": 3, "generator": torch.Generator().manual_seed(0), **options}
    return sampler(model, condition, law=law, **options)


@pytest.mark.parametrize(("model", "condition", "law"), MODELS)
def test_raster_order_gives_the_tokens_of_autoregressive_sampling(model, condition, law):
    want = decode(AutoregressiveSampler(), model, condition, law).tokens
    for sampler in (OrderedSampler(), OrderedSampler("raster")):
        found = decode(sampler, model, condition, law)
        assert torch.equal(found.tokens, want)
        assert found.trace.lossless and (found.trace.target_calls == model.grid.num_tokens).all()


@pytest.mark.parametrize(("model", "condition", "law"), MODELS)
def test_the_diagonal_gives_the_tokens_of_zipar(model, condition, law):
    want = decode(ZipARSampler(1), model, condition, law)
    found = decode(OrderedSampler("diagonal", **ANY_ORDER), model, condition, law)
    assert torch.equal(found.tokens, want.tokens)
    assert torch.equal(found.trace.commit_call, want.trace.commit_call)
    assert torch.equal(found.trace.target_calls, want.trace.target_calls)


@pytest.mark.parametrize(("model", "law"), [(NAR, PLAIN), (NAR, GUIDED), (PAR, PLAIN), (PAR, GUIDED)])
def test_a_trained_model_is_decoded_in_its_own_order(model, law):
    name = model.trained_order
    found, named = (decode(OrderedSampler(order), model, law=law) for order in (None, name))
    assert torch.equal(found.tokens, named.tokens)
    steps = order_of(name, model.grid).steps
    assert (found.trace.target_calls == len(steps)).all()
    for number, step in enumerate(steps):
        assert (found.trace.commit_call[:, step.emitted] == number).all()


@pytest.mark.parametrize("model", [RASTER, NAR, PAR])
def test_fidelity(model):
    own = OrderedSampler()
    assert (
        own.fidelity(model)
        == "trained"
        == OrderedSampler(model.__dict__.get("trained_order")).fidelity(model)
    )
    other = OrderedSampler("diagonal", **ANY_ORDER)
    assert other.fidelity(model) == "approximate"
    assert own.lossless and not other.lossless and not own.identical


def test_the_trace_says_whether_this_run_is_exact():
    allowed = OrderedSampler("raster", **ANY_ORDER)
    assert not allowed.lossless and decode(allowed).trace.lossless
    trace = decode(OrderedSampler("diagonal", **ANY_ORDER)).trace
    assert (trace.lossless, trace.promise) == (
        False,
        "another law",
    ) and "(order=diagonal)" in trace.output_law


def test_an_approximation_is_refused_unless_it_is_allowed():
    for model in (RASTER, TabularOrderModel(TokenGrid(2, 2), 2, "diagonal")):
        order = "diagonal" if model is RASTER else "raster"
        refuses(ValueError, f"'{order}'.*another law", decode, OrderedSampler(order), model)


@pytest.mark.parametrize(
    ("model", "order", "message"),
    [
        (RASTER, "nar", "order='diagonal'.*allow_approximate=True"),
        (TabularModel(TokenGrid(4, 4), 4, order=2), "par4", "3 learned"),
        (NAR, "raster", "'nar'.*'raster'.*heads"),
        (PAR, "nar", "'par4'.*'nar'.*heads"),
    ],
)
def test_an_order_of_other_heads_is_refused_even_if_an_approximation_would_do(model, order, message):
    refuses(ValueError, message, decode, OrderedSampler(order, **ANY_ORDER), model)


@pytest.mark.parametrize(
    "sampler",
    [AutoregressiveSampler(), SpeculativeJacobiSampler(4), ZipARSampler(2), DraftedSampler()],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_samplers_refuse_a_model_of_another_order(sampler):
    parts: Any = {"drafter": RASTER} if sampler.needs_drafter else {}
    refuses(ValueError, "'nar'.*OrderedSampler", decode, sampler, NAR, **parts)


def test_refuses_what_is_not_allowed():
    with pytest.raises(ValueError, match="trained_order.*TabularOrderModel='spiral'"):
        decode(OrderedSampler("raster"), TabularOrderModel(TokenGrid(2, 2), 2, "spiral"))
    with pytest.raises(ValueError, match="4.*1 x 3 x 2"):
        decode(OrderedSampler(), TabularOrderModel(TokenGrid(3, 2), 2, "par4", learned=3))


class Raster(TabularModel):
    def forward(self, state, tokens, slots):  # type: ignore[override]
        raise AssertionError("refused before any compute")


@pytest.mark.parametrize("sampler", [OrderedSampler(), ZipARSampler(2), ParallelJacobiSampler()])
def test_refuses_a_model_that_feeds_in_raster_order_only(sampler):
    refuses(
        TypeError, "Raster.*AutoregressiveSampler", decode, sampler, Raster(TokenGrid(2, 2), 3, conditions=2)
    )


def test_a_callback_may_end_the_decode():
    seen = []

    def stop(call, lengths):
        seen.append(lengths.tolist())
        return STOP if call == 1 else None

    trace = decode(OrderedSampler(), NAR, callback=stop).trace
    assert seen == [[1] * 3, [3] * 3] and trace.stopped
    assert trace.commit_call.tolist() == [[0, 1, -1, 1, -1, -1]] * 3


def test_the_learned_tokens_that_are_fed_are_those_of_the_order():
    """Each by its own id, after the vocabulary: in the first parallel step, after the last of the first tokens."""
    fed = []

    class Watched(TabularOrderModel):
        def __call__(self, state: Any, tokens: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
            fed.append(tokens.clone())
            return super().__call__(state, tokens, *others, **more)

    model = Watched(TokenGrid(2, 4), 2, "par4", learned=3, conditions=2)
    decode(OrderedSampler(), model)
    learned = [tokens[:, (tokens >= 2).any(0)] for tokens in fed if (tokens >= 2).any()]
    assert len(learned) == 1 and learned[0].tolist() == 3 * [[2, 3, 4]]
