"""Every lossless sampler of the registry, by enumeration. A sampler that is added to the registry is enumerated too."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator, distance
from tests.exactness.mixtures import Mixture, MixtureModel, far_apart, straight_sequences
from tests.exactness.regions import total_variation
from tests.helpers.block_tables import TableDrafter
from tests.helpers.order_laws import ORDERS, joint_along, one_a_call
from tests.helpers.refusals import refuses
from tests.helpers.scale_laws import parts as pyramid
from tests.helpers.scale_laws import product_law
from tests.helpers.tabular import TabularColumnModel, TabularMaskedModel, TabularModel, TabularOrderModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from visual_spec.kernels.law import POINT_LAW, UNIFORM_LAW
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import register_to_config
from visual_spec.samplers import registry
from visual_spec.samplers.continuous.continuous import ContinuousSampler
from visual_spec.samplers.core.draft_chain import ChainSampler
from visual_spec.samplers.core.drafts import Draft, Label
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.orders.along_order import slots_in_order
from visual_spec.samplers.orders.ordered import OrderedSampler
from visual_spec.samplers.registry import DRAFTER, RASTER, SamplerEntry, all_samplers, sampler_class
from visual_spec.samplers.scales.stages import Stage

pytestmark = pytest.mark.every_set

# Where the defaults are too large, or not lossless. Of others the window and the number of drafts are made small.
SETTINGS: dict[str, dict[str, Any]] = {
    "ProactiveJacobiSampler": dict(window=2, siblings=2, depth=1),
    "TreeSampler": dict(depth=1, width=2),
    "MultiscaleSampler": dict(pool=1, radius=None, max_rounds=None),
}
SMALLEST = {"window": 2, "num_drafts": 1}


def smallest(entry: SamplerEntry) -> Any:
    """The sampler with settings that can be enumerated, of which the others are the defaults."""
    made = sampler_class(entry)
    known = inspect.signature(made.__init__).parameters
    settings = SETTINGS.get(entry.class_name)
    sampler = made(**settings) if settings else made(**{k: v for k, v in SMALLEST.items() if k in known})
    if hasattr(sampler, "tries"):
        sampler.tries = 1
    return sampler


def half_right(model: Any, other: Any) -> Any:
    other.logits = 0.6 * model.logits + 0.6 * other.logits
    return other


class TableUpsampler:
    """Logits of a picture of four tokens out of three, from one token."""

    num_tokens = 4
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.logits[tokens[:, 0]]


def enumerated(entry: SamplerEntry) -> tuple[Enumeration, Tensor]:
    """What the smallest sampler of an entry does, and the law that it promises."""
    sampler, parts = smallest(entry), {}
    if entry.calls == registry.SCALES:
        tokenizer, [pyramid_model] = pyramid("3 ** 5")
        found = Enumerator(sampler, [Stage(pyramid_model, range(2))], tokenizer=tokenizer).run()
        return found, product_law(tokenizer, [pyramid_model] * 2, [PLAIN] * 2)
    if entry.calls == registry.MASKED:
        hiding = TabularMaskedModel(TokenGrid(2, 2), 2)
        return Enumerator(sampler, hiding).run(), one_a_call(hiding, ORDERS[sampler.config.order])
    if entry.calls == registry.ANY_ORDER:
        joint = TabularAnyOrderModel(TokenGrid(2, 2), 3)
        order = slots_in_order(sampler.config.order, joint.grid, torch.zeros(1, dtype=torch.long))[0]
        return Enumerator(sampler, joint).run(), joint_along(joint, order.tolist())
    if entry.calls == registry.BLOCKS:
        blocks = TabularOrderModel(TokenGrid(2, 4), 2, "blocks2", first=(0, 1, 4, 5))
        law = Enumerator(OrderedSampler(), blocks).run().law  # by slot; below by block
        return Enumerator(sampler, blocks).run(), law.view([2] * 8).permute(0, 1, 4, 5, 2, 3, 6, 7).flatten()
    if entry.calls == registry.COLUMNS:
        valid = CodebookPattern.delay([0, 1]).valid(2).T
        model, other = (TabularColumnModel(valid, 2, seed=seed) for seed in (0, 50))
    elif entry.calls in (RASTER, registry.TREE, registry.ORDER, registry.OWN_ORDER):
        model, other = (TabularModel(TokenGrid(2, 2), 3, seed=seed) for seed in (0, 100))
    else:
        raise NotImplementedError(f"no tabular model answers calls of kind {entry.calls!r}; add one here.")
    if entry.needs == DRAFTER:
        parts["drafter"] = half_right(model, other)
    if entry.class_name == "BlockDraftSampler":
        parts["drafter"] = TableDrafter(other, 2)
    if entry.class_name == "MultiscaleSampler":
        small = TabularModel(TokenGrid(1, 1), 3, seed=7)
        parts["drafter"] = SimpleNamespace(transformer=small, upsampler=TableUpsampler())
    return Enumerator(sampler, model, **parts).run(), model.law_of_sequences(PLAIN)


def is_lossless(entry: SamplerEntry) -> bool:
    return sampler_class(entry)().lossless or smallest(entry).lossless


@pytest.mark.parametrize("entry", [*filter(is_lossless, all_samplers())], ids=lambda entry: entry.name)
def test_every_lossless_sampler_follows_the_law(entry, keys_in_bulk):
    if entry.calls == registry.CONTINUOUS:
        return check_distances(entry)
    if entry.name == "freedave":
        return check_tokens(smallest(entry))
    assert distance(*enumerated(entry)) < 1e-10


def check_tokens(sampler: Any) -> None:
    """A draft uses a step's noise before the step does, so no outcome can be forced: the tokens of each seed, then."""
    model, tokens = TabularMaskedModel(TokenGrid(2, 2), 2), []
    for one in (sampler, MaskedSampler()):
        generator = torch.Generator().manual_seed(0)
        tokens.append(one(model, None, law=PLAIN, generator=generator, batch_size=400).tokens)
    assert torch.equal(*tokens) and len(tokens[0].unique(dim=0)) > 8


def check_distances(entry: SamplerEntry) -> None:
    """Vectors cannot be enumerated: samples of three tokens that depend on each other, beside the chain written out."""
    settings: dict[str, Any] = dict(head_steps=10, eta=1.0, final_noise=0.1)
    made, laws, count = sampler_class(entry), [], 2000
    for place, spread in ((1.0, 0.5), (0.8, 0.6)):
        first = Mixture([0.5, 0.5], [-place, place], [spread, spread])
        laws.append([first, *[Mixture([1.0], [0.1 - 0.1 * place], [spread])] * 2])
    target, draft = (MixtureModel(law, slope=0.6, flow=True) for law in laws)
    parts = {"drafter": draft} if entry.needs == DRAFTER else {}
    smallest = {k: v for k, v in SMALLEST.items() if k in inspect.signature(made.__init__).parameters}

    def draw(model: Any, sampler: Any, **more: Any) -> Tensor:
        more |= dict(law=TokenLaw(), generator=torch.Generator().manual_seed(4), batch_size=count)
        return sampler(model, None, **more).tokens[..., 0]

    expected = straight_sequences(target, 4 * count, 5, **settings)[..., 0]
    assert far_apart(draw(target, made(**smallest, **settings), **parts), expected) < 1
    assert far_apart(draw(draft, ContinuousSampler(**settings)), expected) > 1


def test_all_that_promise_it_are_there():
    assert not [
        entry.name for entry in all_samplers() if "lossless" in entry.promise and not is_lossless(entry)
    ]


# -- a newcomer ------------------------------------------------------------------------------------------------------


class RepeatingSampler(ChainSampler):
    """Drafts the newest token again."""

    kind = POINT_LAW

    @register_to_config
    def __init__(self, num_drafts: int = 5, acceptance: str = "exact") -> None:
        pass

    def plan(self, run: Run) -> None:
        run.window = self.config.num_drafts + 1

    def prepare(self, run: Run) -> State:
        return State.begin(run, scratch=self.config.num_drafts + 1)

    def propose(self, run: Run, state: State) -> Draft:
        newest = state.tokens.gather(1, state.lengths[:, None] - 1)
        drafts = newest.repeat(1, self.config.num_drafts)
        laws = run.cache.logits.new_zeros(len(drafts), 1, run.model.vocab_size)
        label = Label(laws, torch.full_like(drafts, self.kind), (0, run.model.vocab_size))
        return Draft(drafts, label, "the newest token")


class MislabellingSampler(RepeatingSampler):
    """Takes its drafts for draws from a uniform law."""

    kind = UNIFORM_LAW


def newcomer(name: str, calls: str = RASTER) -> SamplerEntry:
    return SamplerEntry("newcomer", f"{__name__}:{name}", calls, "lossless")


def test_a_newcomer_is_enumerated_from_its_entry_alone():
    found, law = enumerated(newcomer("RepeatingSampler"))
    assert total_variation(found.law, law) < 1e-10 and found.calls < 3.8


def test_a_newcomer_that_is_mistaken_is_caught():
    found, law = enumerated(newcomer("MislabellingSampler"))
    assert total_variation(found.law, law) > 1e-2


def test_what_cannot_be_enumerated_fails():
    refuses(NotImplementedError, "'dreams'", enumerated, newcomer("RepeatingSampler", "dreams"))
