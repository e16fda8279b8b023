"""Every sampler that has a page in `samplers.naive` returns the tokens of that page, for the same noise."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.columns import tabular as tabular_columns
from tests.helpers.masked import magnet as tiny_magnet
from tests.helpers.masked import text
from tests.helpers.tabular import TabularMaskedModel, TabularModel
from tests.helpers.tabular_any_order import TabularAnyOrderModel
from tests.helpers.tiny_scales import FormulaTokenizer, TableScaleModel
from tests.models.continuous.tiny import tiny_causal
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.settings import of_settings
from visual_spec.samplers import naive
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice
from visual_spec.samplers.naive import continuous, masked, next_token
from visual_spec.samplers.orders.any_order import AnyOrderSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import code_stages

LAWS = {
    "plain": TokenLaw(),
    "guided": TokenLaw(guidance_scale=2.5, temperature=0.9),
    "filtered": TokenLaw(guidance_scale=1.5, top_k=5, top_p=0.9),
}
GRID, SEEDS = TokenGrid(3, 5), range(4)


def target(**changes: Any) -> TabularModel:
    return TabularModel(GRID, 8, order=2, dependence=0.4, **changes)


def drafter() -> TabularModel:
    """About half right."""
    model = target(seed=9)
    model.logits = 0.7 * target().logits + 0.5 * model.logits
    return model


def noise_of(seed: int) -> CounterNoise:
    return CounterNoise(torch.tensor([1000 + seed]), "cpu")


def codes() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def tree_of(**changes: Any) -> dict[str, Any]:
    return dict(depth=3, width=4) | changes


def tokens_of(sampler: Any, model: Any, law: TokenLaw, seed: int, condition: Any = None, **parts: Any) -> Any:
    return sampler(model, condition, law=law, generator=noise_of(seed), batch_size=1, **parts)


def equal_on_all_seeds(
    page: Callable[..., Any], sampler: Any, model: Any, law: TokenLaw, parts: Any = None, **settings: Any
) -> None:
    """Tokens of page and sampler; and calls, where the page counts them. Samples differ from seed to seed."""
    parts, seen = parts or {}, set()
    for seed in SEEDS:
        first = (model, parts["drafter"]) if "drafter" in parts else (model,)
        found = page(*first, None, law, noise_of(seed), **settings)
        tokens, calls = found if isinstance(found, tuple) else (found, None)
        result = tokens_of(sampler, model, law, seed, **parts)
        assert torch.equal(tokens, result.tokens)
        assert calls is None or page in LOOSE or calls == int(result.trace.target_calls)
        seen.add(tuple(tokens.flatten().tolist()))
    assert len(seen) > 1


LOOSE = (
    naive.identical_jacobi,
    naive.column_jacobi,
)  # they draft new slots by another copy, so calls may differ


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
class TestTokensOfThePage:
    def test_plain_decoding(self, law):
        equal_on_all_seeds(naive.autoregressive, AutoregressiveSampler(), target(), law)

    @pytest.mark.parametrize("window", [1, 4, 32])
    def test_identical_jacobi(self, law, window):
        equal_on_all_seeds(
            naive.identical_jacobi, SpeculativeJacobiSampler(window), target(), law, window=window
        )

    @pytest.mark.parametrize("window", [2, 5])
    def test_speculative_jacobi(self, law, window):
        sampler = SpeculativeJacobiSampler(window, "independent", "exact", "uniform")
        equal_on_all_seeds(naive.speculative_jacobi, sampler, target(), law, window=window)

    @pytest.mark.parametrize("size, gap", [(3, 0.15), (6, 0.4)])
    def test_grouped(self, law, size, gap):
        numbers = {"group_size": size, "probability_gap": gap, "code_distance": None}
        sampler = SpeculativeJacobiSampler(4, "independent", "grouped", "uniform", numbers)
        equal_on_all_seeds(
            naive.grouped_speculative, sampler, target(), law, window=4, group_size=size, gap=gap
        )

    @pytest.mark.parametrize("num_drafts", [1, 4])
    def test_chain(self, law, num_drafts):
        parts = {"drafter": drafter()}
        sampler = DraftedSampler(num_drafts)
        equal_on_all_seeds(naive.speculative_chain, sampler, target(), law, parts, num_drafts=num_drafts)

    @pytest.mark.parametrize("nodes", [None, 5])
    def test_tree(self, law, nodes):
        parts, shape = {"drafter": drafter()}, tree_of(num_nodes=nodes)
        sampler = TreeSampler(**shape, siblings="top-k")
        equal_on_all_seeds(naive.speculative_tree, sampler, target(), law, parts, **shape)

    @pytest.mark.parametrize("delta", [0.1, 0.6])
    def test_lantern(self, law, delta):
        parts, shape = {"drafter": drafter(), "codebook": codes()}, tree_of()
        numbers = {"delta": delta, "neighbours": 5}
        sampler = TreeSampler(**shape, siblings="top-k", acceptance="lantern", relaxation=numbers)
        settings = dict(codebook=codes(), delta=delta, neighbours=5, **shape)
        equal_on_all_seeds(naive.lantern, sampler, target(), law, parts, **settings)

    @pytest.mark.parametrize("pattern", ["musicgen", "gap"])
    def test_columns(self, law, pattern):
        sampler = ColumnJacobiSampler(window=5)
        equal_on_all_seeds(naive.column_jacobi, sampler, tabular_columns(pattern), law, window=5)

    @pytest.mark.parametrize("order", [None, [5, 0, 3, 1, 4, 2]], ids=["random", "given"])
    def test_any_order(self, law, order):
        model = TabularAnyOrderModel(TokenGrid(2, 3), 3)
        row = None if order is None else torch.tensor([order])
        sampler = AnyOrderSampler(order or "random")
        equal_on_all_seeds(naive.any_order, sampler, model, law, order=row)

    @pytest.mark.parametrize("steps, choice", [(4, 0.0), (3, 2.0), (1, 0.0)])
    def test_maskgit(self, law, steps, choice):
        model = TabularMaskedModel(TokenGrid(2, 3), 3)
        sampler = MaskedSampler(steps, choice=Choice(choice_temperature=choice))
        equal_on_all_seeds(naive.maskgit, sampler, model, law, steps=steps, choice_temperature=choice)

    def test_collaborative(self, law):
        tokenizer = FormulaTokenizer((1, 2, 3, 4), 6)
        large, small = (TableScaleModel((1, 2, 3, 4), 6, seed=seed) for seed in (0, 5))
        for seed in SEEDS:
            condition = torch.tensor([0])
            page = naive.collaborative(large, small, tokenizer, condition, law, noise_of(seed), 2)
            stages = code_stages(large, small, 2)
            result = ScaleWiseSampler()(
                stages,
                condition,
                tokenizer=tokenizer,
                law=law,
                generator=noise_of(seed),  # pyright: ignore[reportArgumentType]
            )
            assert torch.equal(page, result.tokens)


@pytest.mark.parametrize("law", [TokenLaw(), TokenLaw(guidance_scale=3.0, temperature=1.5, top_k=9)])
def test_magnet(law):
    model, seen = tiny_magnet(), set()
    settings = dict(clock="magnet", temperature="falling", guidance="falling", span=3)
    sampler = of_settings(MaskedSampler, [5, 3, 2, 1], **settings)
    for seed in SEEDS:
        page = naive.magnet(model, text([0]), law, noise_of(seed), steps=[5, 3, 2, 1], span=3)
        assert torch.equal(page, tokens_of(sampler, model, law, seed, text([0])).tokens)
        seen.add(tuple(page.flatten().tolist()))
    assert len(seen) == len(SEEDS)


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_continuous(scale):
    """Drafts of a drafter that is near to the model are kept, of one that is not refused; both are met."""
    settings: dict[str, Any] = dict(head_kind="velocity", head_steps=3)
    model: Any = tiny_causal(**settings).double()
    near: Any = tiny_causal(**settings).double()
    for one in near.parameters():
        one.data *= 1.002
    law, labels = TokenLaw(guidance_scale=scale), torch.tensor([3])
    sampler = SpeculativeContinuousSampler("path", 3, head_steps=3, eta=1.0, final_noise=0.7)
    kept = tested = 0
    for seed in SEEDS[:2]:
        page, calls = naive.continuous_speculative(
            model, near, labels, law, noise_of(seed), 3, levels=3, eta=1.0, end=0.7
        )
        result = tokens_of(sampler, model, law, seed, labels, drafter=near)
        by_place = torch.empty_like(page).index_copy(1, model.places[: page.shape[1]], page)
        assert calls == int(result.trace.target_calls)
        assert (by_place - result.tokens).abs().max() < 1e-6  # the tables of the chain are float32
        kept, tested = kept + int(result.trace.kept), tested + int(result.trace.tested)
    assert 0 < kept < tested


def test_a_page_fits_a_screen():
    pages = [
        (name, page)
        for module in (continuous, masked, next_token)
        for name, page in vars(module).items()
        if inspect.isfunction(page) and page.__module__ == module.__name__
    ]
    assert {page for _, page in pages} >= {getattr(naive, name) for name in naive.__all__}
    for name, page in pages:
        lines = inspect.getsource(page).split('"""')
        code = [line for part in lines[::2] for line in part.splitlines() if line.strip()]
        assert len(code) <= 40, name
