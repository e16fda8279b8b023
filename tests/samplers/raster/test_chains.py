"""What holds for every sampler that tests chains of drafts, of tokens and of columns, under each of its settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.helpers import columns, drafting
from tests.helpers.refusals import refuses
from tests.helpers.sampler_settings import lossy
from tests.helpers.tiny import seeded
from visual_spec.kernels import law
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core import noise
from visual_spec.samplers.core.checks import COUPLINGS
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.raster import drafted, jacobi_identical
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.column_base import UNITS, ColumnSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import COLUMN_DRAFTS, ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler

WINDOW = 6
RELAXED_RULES = ("grouped", "clustered", "lantern")
RULES = [("gumbel", "identical"), *((coupling, "exact") for coupling in COUPLINGS)]
UNITED = [(*RULES[0], "column"), *((*rule, unit) for rule in RULES[1:] for unit in UNITS)]
GUIDED = TokenLaw(guidance_scale=1.8, top_k=5)
GREEDY = TokenLaw(temperature=0.0)
CODES = torch.nn.functional.normalize(
    torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0)), dim=-1
)
RELAXATIONS: dict[str, dict[str, Any]] = {
    "grouped": lossy("grouped", group_size=6, code_distance=2.0, probability_gap=0.3),
    "clustered": lossy("clustered", group_size=4),
    "lantern": lossy("lantern", delta=0.3, neighbours=5),
    "lantern++": lossy("lantern", factor=3.0, neighbours=5),
    "bounded": lossy("lantern", delta=0.1, factor=4.0, neighbours=5, bounded=True),
}
NOTHING: dict[str, dict[str, Any]] = {
    "grouped": lossy("grouped", group_size=1, code_distance=None),
    "lantern": lossy("lantern", delta=0.0, neighbours=3),
}
# Samplers that relax, by name: how a sampler with these settings is made.
MAKERS: dict[str, Any] = {
    **{
        f"jacobi {coupling}": lambda coupling=coupling, **rule: SpeculativeJacobiSampler(WINDOW, coupling, **rule)
        for coupling in COUPLINGS
    },
    **{
        f"columns {coupling}": lambda coupling=coupling, **rule: ColumnJacobiSampler(
            WINDOW, coupling, unit="codebook", **rule
        )
        for coupling in COUPLINGS
    },
    "drafted": lambda **rule: DraftedSampler(4, 0.2, **rule),
    "tree, top-k": lambda **rule: TreeSampler(3, 3, siblings="top-k", **rule),
    "tree, some nodes": lambda **rule: TreeSampler(3, 3, siblings="top-k", num_nodes=7, **rule),
    "tree, drawn": lambda **rule: TreeSampler(3, 3, **rule),
}  # fmt: skip
LOSSLESS: dict[str, Any] = {
    **{
        f"jacobi {' '.join(one)}": SpeculativeJacobiSampler(WINDOW, *one)
        for rule in RULES
        for initial in ("uniform", "left", "up", "last_law")
        for one in [(*rule, initial)]
    },
    **{
        f"proactive {' '.join(rule)} {initial}": ProactiveJacobiSampler(WINDOW, 3, 2, *rule, initial)
        for rule, initial in product(RULES, ("left", "last_law"))
    },
    "proactive k-seq": ProactiveJacobiSampler(WINDOW, 3, 2, sibling_rule="k-seq"),
    **{
        f"drafted {acceptance} {stop}": DraftedSampler(5, stop, acceptance)
        for acceptance, stop in product(("exact", "identical", "block"), (0.0, 0.3))
    },
    **{
        f"tree {siblings} {acceptance}": TreeSampler(3, 3, siblings=siblings, acceptance=acceptance)
        for siblings, acceptance in product(("without-replacement", "top-k"), ("exact", "identical"))
    },
    "tree of some nodes, identical": TreeSampler(3, 3, num_nodes=5, siblings="top-k", acceptance="identical"),
    **{
        f"columns {' '.join(rule)} {initial}": ColumnJacobiSampler(WINDOW, *rule, initial)
        for rule, initial in product(UNITED, COLUMN_DRAFTS)
    },
    "drafted columns exact": DraftedColumnSampler(5),
    "drafted columns identical": DraftedColumnSampler(5, "identical"),
}
PLAIN = {"identical tokens": AutoregressiveSampler(), "identical columns": ColumnAutoregressiveSampler()}
RELAXED = {
    f"{name} {rule}": make(**RELAXATIONS[rule]) for name, make in MAKERS.items() for rule in RELAXATIONS
}
CHAINS = LOSSLESS | {name: RELAXED[name] for name in list(RELAXED)[::2]}


@dataclass(frozen=True)
class Tables:
    """Tables of laws, and what is decoded with them."""

    model: Any
    drafter: Any
    codebook: Tensor
    plain: Any


TOKENS = Tables(drafting.MODEL, drafting.NEAR, drafting.CODEBOOK, AutoregressiveSampler())
COLUMNS = Tables(columns.MODEL, columns.POOR, CODES, ColumnAutoregressiveSampler())


def tables_of(sampler: Any) -> Tables:
    return COLUMNS if isinstance(sampler, ColumnSampler) else TOKENS


def decode(sampler: Any, samples: Any = range(4), law: TokenLaw = GUIDED, **more: Any) -> SampleResult:
    tables, samples = tables_of(sampler), list(samples)
    known = {"drafter": tables.drafter, "codebook": tables.codebook}
    parts = {name: known[name] for name in sampler.takes if name in known}
    if not sampler.needs_codebook:
        parts.pop("codebook", None)
    condition, generator = torch.tensor([sample % 3 for sample in samples]), seeded(*samples)
    arguments: dict[str, Any] = dict(law=law, generator=generator, batch_size=len(samples), **parts)
    return sampler(tables.model, condition, **{**arguments, **more})


@pytest.fixture
def calls(monkeypatch) -> Iterator[list[Tensor]]:
    """The slots of every call of a target."""
    seen: list[Tensor] = []
    for tables in (TOKENS, COLUMNS):
        kind = type(tables.model)

        def forward(
            self: Any, state: Any, tokens: Tensor, slots: Tensor, *rest: Any, real=kind.forward
        ) -> Tensor:
            if self in (TOKENS.model, COLUMNS.model):
                seen.append(slots.clone())
            return real(self, state, tokens, slots, *rest)

        monkeypatch.setattr(kind, "forward", forward)
    yield seen


@pytest.mark.parametrize("name", LOSSLESS | PLAIN)
def test_the_trace_counts_the_calls_of_every_sample(calls, name):
    sampler, committed = (LOSSLESS | PLAIN)[name], []
    length = tables_of(sampler).model.grid.num_tokens
    result = decode(sampler, callback=lambda call, lengths: committed.append((call, lengths.clone())))
    trace, count = result.trace, len(calls) + 1  # the prefill is a call
    assert trace.commit_call.shape == result.tokens.shape[:2] == (4, length)
    assert result.tokens.dtype == torch.int64
    if result.tokens.dim() == 2:
        # No view that keeps the scratch alive.
        assert result.tokens.untyped_storage().nbytes() == 4 * length * 8
    assert trace.target_calls.tolist() == (trace.commit_call.amax(1) + 1).tolist()
    assert trace.target_calls.max() == count
    torch.testing.assert_close(trace.tokens_per_call, length / trace.target_calls.float())
    # Slot 0 is the prefill's. After it every call commits 1 to W slots, in order; none while a column is replaced.
    assert (trace.commit_call.diff(dim=1) >= 0).all()
    stalls = isinstance(sampler, ColumnSampler) and not sampler.identical
    for row in range(4):
        per_call = torch.bincount(trace.commit_call[row], minlength=int(trace.target_calls[row]))
        assert per_call[0] == 1 and per_call.max() <= WINDOW and (stalls or per_call.min() >= 1)
    assert [call for call, _ in committed] == list(range(count))
    for call, lengths in committed:
        assert lengths.tolist() == (trace.commit_call <= call).sum(1).tolist()
    empty = SimpleNamespace(logits=torch.zeros(1, 1))
    keys, model = torch.zeros(1, dtype=torch.long), tables_of(sampler).model
    room = length + sampler.begin(model, None, TokenLaw(), keys, prefill=lambda run: empty).window
    assert max(int(slots.max()) for slots in calls) < room
    if not isinstance(
        sampler, TreeSampler | ProactiveJacobiSampler
    ):  # slots in a row, from the newest token on
        for call, slots in enumerate(calls, start=1):
            before = (trace.commit_call < call).sum(1)
            assert (slots.diff(dim=1) == 1).all()
            assert torch.equal(slots[:, 0], before[before < length] - 1)
    drafts = {"draft"} if sampler.needs_drafter else set()
    assert set(trace.phase_seconds) == {"prefill", "model", "verify"} | drafts
    assert 0 < sum(trace.phase_seconds.values()) <= trace.seconds and trace.peak_memory is None
    assert trace.lossless and sampler.lossless and trace.divergence is None and trace.moved_mass is None
    assert trace.identical == sampler.identical == ("identical" in name)


@pytest.mark.fast_sets(42)
@pytest.mark.parametrize("name", CHAINS)
def test_a_sample_does_not_depend_on_its_batch(name):
    sampler = CHAINS[name]
    together = decode(sampler, range(5))
    assert together.trace.commit_call.unique(dim=0).shape[0] > 1  # the rows part company
    for rows in ([3], [4, 1, 0]):  # alone, and turned
        fewer = decode(sampler, rows)
        assert torch.equal(fewer.tokens, together.tokens[rows])
        assert torch.equal(fewer.trace.commit_call, together.trace.commit_call[rows])
        assert torch.equal(fewer.trace.target_calls, together.trace.target_calls[rows])
        if fewer.trace.moved_mass is not None:
            assert together.trace.moved_mass is not None
            torch.testing.assert_close(fewer.trace.moved_mass, together.trace.moved_mass[rows])


@pytest.mark.parametrize(
    "sampler, drafter",
    [
        (DraftedSampler(4, 0.35), "eagle"),
        (DraftedSampler(4), "model"),
        (TreeSampler(3, 3), "eagle"),
        (TreeSampler(3, 3, siblings="top-k"), "model"),
        (ProactiveJacobiSampler(6, 2, 2), None),
    ],
)
def test_a_sample_of_a_network_does_not_depend_on_its_batch(sampler, drafter):
    """As above, with the caches of target and drafter."""
    model, eagle = drafting.eagle_pair()
    law, several = TokenLaw(guidance_scale=1.5, temperature=1.5), drafting.captions(4)
    parts = {} if drafter is None else {"drafter": eagle if drafter == "eagle" else drafting.draft_model()}
    together = sampler(model, several, law=law, generator=seeded(0, 1, 2, 3), batch_size=4, **parts)
    assert together.trace.target_calls.unique().numel() > 1
    for row in range(4):
        one = type(several)(several.features[row : row + 1], several.mask[row : row + 1])
        alone = sampler(model, one, law=law, generator=seeded(row), batch_size=1, **parts)
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.trace.commit_call[0], together.trace.commit_call[row])


@pytest.mark.fast_sets(20)
@pytest.mark.parametrize("name", LOSSLESS)
def test_greedy_decoding_is_the_same_everywhere(name):
    sampler = LOSSLESS[name]
    expected = decode(tables_of(sampler).plain, law=GREEDY)
    assert torch.equal(decode(sampler, law=GREEDY).tokens, expected.tokens)


@pytest.mark.fast_sets(20)
@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.usefixtures("whole_batch")
def test_no_committed_token_changes(monkeypatch, name):
    """Nor is a sample that is complete charged for the calls of others, where it cannot leave."""
    sampler = LOSSLESS[name]
    kind, real_step = type(sampler), type(sampler).step

    def step(self, run, state):
        lengths, tokens, calls = state.lengths.clone(), state.tokens.clone(), state.target_calls.clone()
        real_step(self, run, state)
        settled, done = torch.arange(tokens.shape[1]) < lengths[:, None], lengths == run.num_tokens
        assert torch.equal(state.tokens[settled], tokens[settled]) and (state.lengths >= lengths).all()
        assert torch.equal(state.target_calls, calls + ~done)

    monkeypatch.setattr(kind, "step", step)
    assert decode(sampler, range(8)).trace.target_calls.unique().numel() > 1


@pytest.mark.fast_sets(14)
@pytest.mark.parametrize("name", CHAINS)
def test_logits_of_slots_past_the_grid_and_of_forced_entries_count_for_nothing(monkeypatch, name):
    sampler = CHAINS[name]
    expected, tables = decode(sampler), tables_of(sampler)
    kind, length = type(tables.model), tables.model.grid.num_tokens

    def forward(
        self: Any, state: Any, tokens: Tensor, slots: Tensor, *rest: Any, real=kind.forward
    ) -> Tensor:
        logits = real(self, state, tokens, slots, *rest)
        if self is not tables.model:
            return logits
        if tables is COLUMNS:
            counts = pad(self.valid, (0, 0, 0, state.window + 1))[slots + 1]
        else:
            counts = slots + 1 < length
        repeats = [logits.shape[0] // slots.shape[0], *([1] * (counts.dim() - 1))]
        return logits.where(counts.repeat(repeats)[..., None], torch.nan)

    def prefill(self: Any, *args: Any, real=kind.prefill, **named: Any) -> Any:
        state = real(self, *args, **named)
        if self is COLUMNS.model:
            state.logits = state.logits.where(self.valid[0, :, None], torch.nan)
        return state

    monkeypatch.setattr(kind, "forward", forward)
    monkeypatch.setattr(kind, "prefill", prefill)
    found = decode(sampler)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.trace.target_calls, expected.trace.target_calls)
    assert found.trace.divergence == expected.trace.divergence


@pytest.mark.fast_sets(14)
@pytest.mark.parametrize("name", CHAINS)
def test_a_step_never_asks_the_host_about_a_tensor(operations_of, monkeypatch, name):
    operations = operations_of(type(CHAINS[name]))
    # Asks on the CPU only, as do those that `on_host` lets.
    monkeypatch.setattr(drafted, "nobody", lambda going: False)
    for module in (law, noise, jacobi_identical):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)
    decode(CHAINS[name], range(2))
    assert not operations.that_ask_the_host()
    if "some nodes" not in name:  # whose numbers differ
        sorts = {name for name in operations.names if name.startswith("aten.sort")}
        assert sorts <= {"aten.sort.stable"}


# ------------------------------------------------------------------------------------------------- relaxed rules


@pytest.mark.fast_sets(16)
@pytest.mark.parametrize("name", RELAXED)
def test_relaxed_samplers_say_that_they_are_lossy_and_by_how_much(name):
    sampler, samples = RELAXED[name], range(12)
    assert sampler.needs_codebook and not sampler.lossless and not sampler.identical
    trace = decode(sampler, samples, TokenLaw()).trace
    assert not trace.lossless and not trace.identical
    assert trace.divergence is not None and 0.001 < trace.divergence < 0.6
    # Of a bounded rule, and of siblings, all of the distance is measured.
    bound = "" if sampler.relaxation.bounded or isinstance(sampler, TreeSampler) else "at least "
    assert trace.summary().endswith(f"lossy, measured divergence {bound}{trace.divergence:.4f}")
    assert trace.moved_mass is not None and trace.moved_mass.shape == (12,)
    # Every token after the first slot is tested at most once.
    tables = tables_of(sampler)
    tested = int(tables.model.valid[1:].sum()) if tables is COLUMNS else tables.model.grid.num_tokens - 1
    assert trace.moved_mass.sum() <= trace.divergence * 12 * tested + 1e-9
    if sampler.relaxation.bounded:
        assert trace.divergence <= 0.1


@pytest.mark.fast_sets(20)
@pytest.mark.parametrize("rule", [rule for rule in RELAXATIONS if rule != "grouped"])  # it may withhold more
@pytest.mark.parametrize("name", MAKERS)
def test_relaxing_takes_fewer_calls(name, rule):
    samplers = MAKERS[name](acceptance="exact"), MAKERS[name](**RELAXATIONS[rule])
    exact, relaxed = (decode(sampler, range(24), TokenLaw()).trace.target_calls for sampler in samplers)
    assert relaxed.float().mean() < 0.99 * exact.float().mean()


@pytest.mark.parametrize("rule", NOTHING)
@pytest.mark.parametrize("name", MAKERS)
def test_settings_that_relax_nothing_return_the_tokens_of_the_exact_rule(name, rule):
    expected = decode(MAKERS[name](acceptance="exact"))
    found = decode(MAKERS[name](**NOTHING[rule]))
    if "maximal" not in name:  # where a relaxed rule draws its redrafts with noise of their own
        assert torch.equal(found.tokens, expected.tokens)
    assert found.trace.divergence == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", MAKERS)
def test_a_codebook_that_does_not_fit_is_refused_before_any_compute(monkeypatch, name):
    sampler = MAKERS[name](**lossy("lantern", neighbours=5))
    tables = tables_of(sampler)
    codes, size = tables.codebook, tables.model.vocab_size
    monkeypatch.setattr(type(tables.model), "prefill", None)
    for rule in RELAXED_RULES:
        refuses(ValueError, "codebook=", decode, MAKERS[name](**lossy(rule)), codebook=None)
    for codebook, message in (
        (codes[1:], r"codebook of shape"),
        (codes[..., :-1, :], rf"codebook of shape \({size - 1}, .*{size}"),
        (codes[0], r"codebook of shape"),
    ):
        refuses(ValueError, message, decode, sampler, codebook=codebook)
    refuses(ValueError, f"neighbours={size}", decode, MAKERS[name](**lossy("lantern", neighbours=size)))
    with pytest.raises(ValueError, match="delta=1.5"):
        MAKERS[name](**lossy("lantern", delta=1.5))
