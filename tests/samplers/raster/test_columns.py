"""The column samplers as objects: identity, traces, raggedness, configuration, refusals. Laws: tests/exactness."""

import copy
import itertools
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.columns import FRAMES, LAW, LAWS, MODEL, MODELS, PATTERNS, decode
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularColumnModel, TabularModel
from tests.helpers.tiny import seeded
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.checks import COUPLINGS
from visual_spec.samplers.core.drafts import Label
from visual_spec.samplers.raster import column_base
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.column_base import UNITS
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import COLUMN_DRAFTS, ColumnJacobiSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

EXACT_ROWS = [(coupling, "exact", unit) for coupling in COUPLINGS for unit in UNITS]
ROWS = [("gumbel", "identical", "column"), *EXACT_ROWS]


def as_kind(kind: type[TabularColumnModel]) -> Any:
    """`MODEL`, with its tables, as another class."""
    model: Any = copy.copy(MODEL)
    model.__class__ = kind
    return model


# --------------------------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_identical_mode_returns_the_autoregressive_tokens(law, batch_size, pattern):
    rows = range(batch_size)
    expected = decode(ColumnAutoregressiveSampler(), MODELS[pattern], law, rows).tokens
    settings = [(1, "left"), (2, "uniform"), (8, "left"), (8, "last_law"), (64, "left")]
    for window, initial_draft in settings if pattern == "musicgen" else settings[2:4]:
        sampler = ColumnJacobiSampler(window, initial_draft=initial_draft)
        assert torch.equal(decode(sampler, MODELS[pattern], law, rows).tokens, expected)


class OneCodebook:
    """A model of one token a slot, as a column model of one codebook."""

    def __init__(self, model: TabularModel) -> None:
        self.model, self.vocab_size, self.special_id = model, model.vocab_size, 0
        self.grid = TokenGrid(1, model.grid.num_tokens, codebooks=1)
        self.valid = torch.ones(model.grid.num_tokens, 1, dtype=torch.bool)

    def prefill(self, *args, **kwargs):
        state = self.model.prefill(*args, **kwargs)
        state.logits = state.logits[:, None]
        return state

    def __call__(self, state, tokens, steps):
        return self.model(state, tokens[..., 0], steps)[:, :, None]


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_one_codebook_is_decoded_as_by_the_plain_samplers(law):
    """Every draw is shared with `jacobi`."""
    plain = TabularModel(TokenGrid(1, 24), 7, order=2, conditions=3, dependence=0.3)
    column = OneCodebook(plain)
    expected = decode(AutoregressiveSampler(), plain, law)
    assert torch.equal(decode(ColumnAutoregressiveSampler(), column, law).tokens[..., 0], expected.tokens)
    for coupling, acceptance in (("gumbel", "identical"), *((coupling, "exact") for coupling in COUPLINGS)):
        for initial_draft in ("uniform", "last_law"):
            settings = coupling, acceptance
            jacobi = SpeculativeJacobiSampler(5, *settings, initial_draft, drafts="carried")
            expected = decode(jacobi, plain, law)
            found = decode(ColumnJacobiSampler(5, *settings, "codebook", initial_draft), column, law)
            assert torch.equal(found.tokens[..., 0], expected.tokens)
            assert torch.equal(found.trace.commit_call, expected.trace.commit_call)


def test_near_ties_of_one_codebook_are_those_of_the_plain_samplers(monkeypatch):
    monkeypatch.setattr("visual_spec.samplers.core.base.low_precision_of", lambda model: "bfloat16")
    plain = TabularModel(TokenGrid(1, 24), 7, order=2, conditions=3, dependence=0.3)
    for law in (LAW, LAWS["greedy"]):
        expected = decode(AutoregressiveSampler(), plain, law).trace.near_ties
        assert expected is not None and (expected.sum() > 0 or law.temperature == 0)
        for sampler in (ColumnAutoregressiveSampler(), ColumnJacobiSampler(5)):
            found = decode(sampler, OneCodebook(plain), law).trace.near_ties
            assert found is not None and torch.equal(found, expected)


# ----------------------------------------------------------------------------------------------- result and trace


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_tokens_fill_the_pattern_and_nothing_else(coupling, acceptance, unit, pattern):
    model, valid = MODELS[pattern], MODELS[pattern].valid
    for law in (LAW, LAWS["allowed"]):
        tokens = decode(ColumnJacobiSampler(6, coupling, acceptance, unit), model, law).tokens
        assert tokens.shape == (4, *valid.shape) and tokens.dtype == torch.int64
        assert (tokens[:, ~valid] == model.special_id).all()
        first, stop = law.allowed or (0, 7)
        assert first <= tokens[:, valid].min() and tokens[:, valid].max() < stop
        codes = PATTERNS[pattern].revert(tokens.transpose(1, 2))  # [B, K, T]
        assert codes.shape == (4, valid.shape[1], FRAMES) and codes.max() < stop


class Counting(TabularColumnModel):
    """Counts its calls and keeps what it was asked and fed."""

    def prefill(self, *args, **kwargs):
        self.asked = kwargs
        self.calls: list[tuple[Tensor, Tensor]] = []
        return super().prefill(*args, **kwargs)

    def forward(self, state, tokens, steps):
        self.calls.append((tokens.clone(), steps.clone()))
        return super().forward(state, tokens, steps)


def test_the_model_is_fed_the_special_id_exactly_where_the_pattern_has_no_token():
    for coupling, acceptance, unit in ROWS:
        model = as_kind(Counting)
        decode(ColumnJacobiSampler(6, coupling, acceptance, unit), model, LAWS["guided"])
        assert model.asked == {"batch_size": 4, "guided": True, "window": 6}
        valid = torch.nn.functional.pad(model.valid, (0, 0, 0, 6))
        for tokens, steps in model.calls:
            assert (steps.diff(dim=1) == 1).all()
            assert torch.equal(tokens == model.special_id, ~valid[steps])


@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
@pytest.mark.parametrize("initial_draft", COLUMN_DRAFTS)
def test_one_step_needs_the_prefill_only(coupling, acceptance, unit, initial_draft):
    model = Counting(torch.tensor([[True, False, True]]), 5)
    result = ColumnJacobiSampler(4, coupling, acceptance, unit, initial_draft)(
        model, None, law=LAW, batch_size=2
    )
    assert result.tokens.shape == (2, 1, 3) and (result.tokens[:, 0, 1] == 5).all()
    assert model.calls == [] and result.trace.target_calls.tolist() == [1, 1]


def test_steps_that_hold_nothing_are_passed_over():
    """Between the end of codebook 0 and the start of codebook 1: they are certain, so a window commits them at once."""
    valid = CodebookPattern.delay([0, 9]).valid(3).T
    assert (~valid.any(1)).sum() == 6
    model = TabularColumnModel(valid, 4, order=1)
    for unit in UNITS:
        trace = ColumnJacobiSampler(8, acceptance="exact", unit=unit)(
            model, None, law=LAW, batch_size=64
        ).trace
        assert trace.target_calls.max() <= 6 and trace.tokens_per_call.min() >= 2


def test_columns_and_coupled_drafts_are_kept_more_often():
    """More often than codebook by codebook, and more often than independent drafts."""
    model = TabularColumnModel(CodebookPattern.delay([0, 1, 2]).valid(62).T, 6, order=1, dependence=0.05)
    rate = {}
    for coupling, unit in itertools.product(COUPLINGS, UNITS):
        sampler = ColumnJacobiSampler(16, coupling, "exact", unit, "last_law")
        result = sampler(model, None, law=LAW, generator=seeded(*range(24)), batch_size=24)
        rate[coupling, unit] = float(result.trace.tokens_per_call.mean())
    for coupling in COUPLINGS:
        assert rate[coupling, "column"] > 1.1 * rate[coupling, "codebook"]
    for unit in UNITS:
        assert min(rate["gumbel", unit], rate["maximal", unit]) > 1.2 * rate["independent", unit]


@pytest.mark.parametrize("unit", UNITS)
def test_tries_that_fail_put_the_replacement_off(monkeypatch, unit):
    """With none ever kept at once, every refusal costs a call more; the tokens come all the same."""
    real = column_base.draw_product_residual
    asked = []

    def seldom(*args, **kwargs):
        tokens, found = real(*args, **kwargs)
        asked.append(found)
        return tokens, found & (len(asked) % 2 == 0)

    monkeypatch.setattr(column_base, "draw_product_residual", seldom)
    sampler = ColumnJacobiSampler(6, "independent", "exact", unit)
    result = decode(sampler, rows=[0])
    assert (result.tokens[:, MODEL.valid] < 7).all()
    stalled = torch.bincount(result.trace.commit_call[0], minlength=int(result.trace.target_calls[0])) == 0
    assert stalled.any() == (unit == "column") and bool(asked) == (unit == "column")


# ------------------------------------------------------------------------------------------------------- relaxed

CODES = torch.nn.functional.normalize(
    torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0)), dim=-1
)


def test_each_codebook_has_the_groups_of_its_own_codes():
    """Reordering the codes of one codebook changes what is kept; a table for all would not see it."""
    sampler = ColumnJacobiSampler(6, unit="codebook", **lossy("clustered", group_size=3))
    swapped = torch.cat([CODES[:3], CODES[3:].flip(1)])
    first, second = (decode(sampler, rows=range(8), codebook=codes) for codes in (CODES, swapped))
    assert not torch.equal(first.trace.commit_call, second.trace.commit_call)


# ------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("coupling, acceptance, unit", ROWS)
def test_memory_does_not_grow_with_length_times_vocabulary(monkeypatch, coupling, acceptance, unit):
    model = TabularColumnModel(CodebookPattern.delay([0, 1]).valid(200).T, 16, order=0)
    real_step = ColumnJacobiSampler.step

    def step(self, run, state):
        real_step(self, run, state)
        label = getattr(state, "label", None)
        held = [state] if label is None else [state, label]
        assert (label is None) == (acceptance == "identical") and (label is None or isinstance(label, Label))
        for owner in held:
            for field in fields(owner):
                value = getattr(owner, field.name)
                if isinstance(value, Tensor):
                    assert value.numel() <= max(2 * 205 * 2, 2 * 4 * 2 * 16), field.name

    monkeypatch.setattr(ColumnJacobiSampler, "step", step)
    ColumnJacobiSampler(4, coupling, acceptance, unit)(model, None, law=LAW, batch_size=2)


# ------------------------------------------------------------------------------------------------------ refusals


def test_refuses_combinations_that_mean_nothing():
    refuses(ValueError, "coupling='gumbel'.*coupling='maximal'", ColumnJacobiSampler, coupling="maximal")
    with pytest.raises(ValueError, match="acceptance='grouped'.*unit='column'.*unit='codebook'"):
        ColumnJacobiSampler(acceptance="grouped")


class Untouched(TabularColumnModel):
    """Refuses to compute."""

    def prefill(self, *args, **kwargs):
        raise AssertionError("the model was run")


@pytest.mark.parametrize("sampler", [ColumnJacobiSampler(4), ColumnAutoregressiveSampler()])
def test_refuses_other_patterns_before_any_compute(sampler):
    model = Untouched(MODEL.valid, 7, order=0)
    with pytest.raises(ValueError, match="TabularModel.*AutoregressiveSampler"):
        sampler(TabularModel(TokenGrid(2, 2), 3), None, law=LAW)
    model.valid = MODEL.valid[:-1]
    refuses(ValueError, r"\(16, 4\).*\(17, 4\)", sampler, model, None, law=LAW)


# ----------------------------------------------------------------------------------------------------- bad logits


# ------------------------------------------------------------------------------------------------ the table model
