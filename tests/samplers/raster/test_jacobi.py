"""The Jacobi sampler as an object: trace, raggedness, configuration, refusals, memory. Its law: tests/exactness."""

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.drafting import Counting
from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.drafts import INITIAL_DRAFTS, Label
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

COMBINATIONS = [("gumbel", "identical"), ("gumbel", "exact"), ("independent", "exact"), ("maximal", "exact")]
MODEL = TabularModel(TokenGrid(8, 8), 16, order=2, conditions=3, dependence=0.2)
CONDITION = torch.tensor([2, 0, 1, 2])
LAW = TokenLaw()


def decode(
    sampler, model=MODEL, condition: Tensor | None = CONDITION, law: TokenLaw = LAW, seed: int = 0, **options
):
    batch_size = options.pop("batch_size", 4)
    generator = torch.Generator().manual_seed(seed)
    return sampler(model, condition, law=law, generator=generator, batch_size=batch_size, **options)


@pytest.mark.parametrize("initial_draft", INITIAL_DRAFTS)
def test_a_narrow_call_keeps_the_drafts_of_a_wider_one(initial_draft):
    sampler = SpeculativeJacobiSampler(12, initial_draft=initial_draft)
    run = sampler.begin(MODEL, CONDITION, LAW, torch.arange(4))
    state = sampler.prepare(run)
    state.width = 12
    sampler.step(run, state)
    first, drawn = state.lengths.clone(), state.tokens.clone()  # slots 1 to 12 were scored
    state.width = 2
    sampler.step(run, state)
    kept = 0
    for row in range(4):
        later = slice(max(int(first[row]) + 2, int(state.lengths[row])), 13)
        assert torch.equal(state.tokens[row, later], drawn[row, later])
        kept += max(0, later.stop - later.start)
    assert kept > 12


@pytest.mark.parametrize("coupling, acceptance", COMBINATIONS)
@pytest.mark.parametrize("initial_draft", INITIAL_DRAFTS)
def test_grid_of_one_token_needs_the_prefill_only(coupling, acceptance, initial_draft):
    model = Counting(TokenGrid(1, 1), 5)
    result = decode(
        SpeculativeJacobiSampler(4, coupling, acceptance, initial_draft), model, None, batch_size=2
    )
    assert result.tokens.shape == (2, 1) and model.calls == []
    assert result.trace.target_calls.tolist() == [1, 1]


def test_coupled_drafts_are_accepted_more_often_than_independent_ones():
    """The point of coupling: with a long window, independent redrafting saturates (SCD, MC-SJD)."""
    model = TabularModel(TokenGrid(16, 16), 32, order=2, dependence=0.1)
    rate = {}
    for coupling, acceptance in COMBINATIONS:
        trace = decode(SpeculativeJacobiSampler(32, coupling, acceptance), model, None).trace
        rate[coupling, acceptance] = float(trace.tokens_per_call.mean())
    independent = rate.pop(("independent", "exact"))
    assert min(rate.values()) > 1.5 * independent


# ------------------------------------------------------------------------------------------------ configuration


# ----------------------------------------------------------------------------------------------------- refusals


def test_stale_drafts_are_repaired_where_that_leaves_the_published_samplers_alone():
    model = TabularModel(TokenGrid(12, 16), 8, order=1, conditions=3, dependence=0.2)

    def calls(acceptance: str, drafts: str | None) -> list[int]:
        sampler = SpeculativeJacobiSampler(8, acceptance=acceptance, drafts=drafts)
        return decode(sampler, model, None).trace.target_calls.tolist()

    assert calls("identical", None) == calls("identical", "repaired") != calls("identical", "carried")
    assert calls("exact", None) == calls("exact", "carried") != calls("exact", "repaired")
    assert (
        not SpeculativeJacobiSampler().needs_drafter
        and SpeculativeJacobiSampler(drafts="chosen").needs_drafter
    )


def test_refuses_to_choose_without_a_drafter():
    refuses(ValueError, "drafter=", decode, SpeculativeJacobiSampler(drafts="chosen"))
    refuses(TypeError, "given drafter", decode, SpeculativeJacobiSampler(), drafter=MODEL)


@pytest.mark.parametrize("coupling", ["independent", "maximal"])
def test_refuses_identical_acceptance_without_gumbel_coupling(coupling):
    with pytest.raises(ValueError, match=f"coupling='gumbel'.*coupling='{coupling}'"):
        SpeculativeJacobiSampler(coupling=coupling)


@pytest.mark.parametrize("sampler", [SpeculativeJacobiSampler(4), AutoregressiveSampler()])
class TestRefusesBeforeAnyCompute:
    def test_codebooks(self, sampler):
        model = TabularModel(TokenGrid(2, 2, codebooks=4), 3)
        with pytest.raises(ValueError, match="4 codebooks"):
            decode(sampler, model, None)

    def test_condition(self, sampler):
        with pytest.raises(ValueError, match=r"torch\.int64.*\(4,\).*\(3,\)"):
            decode(sampler, batch_size=3)


# --------------------------------------------------------------------------------------------------- bad logits


def poisoned(slot: int, value: float, row: int = 1) -> TabularModel:
    """A model whose prediction of `slot` is bad for the samples of table `row`."""
    model = TabularModel(TokenGrid(8, 8), 16, order=2, conditions=3, dependence=0.2)
    model.logits[row, slot] = value
    return model


def test_names_the_unconditional_row():
    with pytest.raises(FloatingPointError, match="sample 0.*4.*3"):
        decode(SpeculativeJacobiSampler(8), poisoned(3, torch.nan, row=3), law=TokenLaw(guidance_scale=2.0))


# ------------------------------------------------------------------------------------------------------- memory


def tensors_of(state) -> Iterator[tuple[str, Tensor]]:
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, Tensor):
            yield field.name, value
        elif isinstance(value, Label):
            yield from tensors_of(value)


class Largest(TorchDispatchMode):
    """The most elements that any operation returned, views of fewer counted as what they are views of."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                stored = value.untyped_storage().nbytes() // value.itemsize
                self.elements = max(self.elements, min(value.numel(), stored))
        return result


@pytest.mark.fast_sets(3)
# Each rule and each draft in every run: they keep their own tensors.
@pytest.mark.parametrize(
    "coupling, acceptance, initial_draft",
    [
        pytest.param(*one, draft, marks=[] if draft == "left" or number == place % 4 else [pytest.mark.slow])
        for number, one in enumerate(COMBINATIONS)
        for place, draft in enumerate(INITIAL_DRAFTS)
    ],
)
def test_memory_does_not_grow_with_length_times_vocabulary(monkeypatch, coupling, acceptance, initial_draft):
    """Per sample: L + W tokens, laws of the W slots of the window, and the noise of 32 slots more. No buffer of
    B x L x V, not even in passing."""
    batch_size, length, window, vocab_size = 2, 192, 4, 32
    model = TabularModel(TokenGrid(12, 16), vocab_size, order=1, conditions=3, dependence=0.2)
    sampler = SpeculativeJacobiSampler(window, coupling, acceptance, initial_draft)
    laws = batch_size * window * vocab_size
    slots = batch_size * (length + window)
    real_step = SpeculativeJacobiSampler.step
    sizes = Largest()

    def step(self, run, state):
        with sizes:
            real_step(self, run, state)
        for name, value in tensors_of(state):
            assert value.untyped_storage().nbytes() <= max(laws, slots) * 8, name
        label = getattr(state, "label", None)
        assert (label is None) == (acceptance == "identical")
        if label is not None:
            assert label.laws.shape == (len(state.lengths), window, vocab_size)
            assert label.rows.shape == (len(state.lengths), window - 1)

    monkeypatch.setattr(SpeculativeJacobiSampler, "step", step)
    decode(sampler, model, None, law=TokenLaw(guidance_scale=2.0), batch_size=batch_size)
    # Guidance doubles the rows of the logits.
    noise = batch_size * (window + 32) * vocab_size
    assert 0 < sizes.elements <= max(2 * max(laws, slots), noise) < batch_size * length * vocab_size / 4
