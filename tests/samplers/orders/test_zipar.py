"""ZipAR and parallel Jacobi decoding against loops that know neither batch nor cache. Laws: tests/exactness."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.llamagen import event_logits, make, text_condition
from tests.helpers.official import random_weights, transformer_shapes
from tests.helpers.row_simulation import Simulation
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.prototype.parallel_jacobi import ROW_DRAFTS, ParallelJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.orders.row_order import RowOrder
from visual_spec.samplers.orders.zipar import ZipARSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

COMBINATIONS = [("gumbel", "identical"), ("gumbel", "exact"), ("independent", "exact"), ("maximal", "exact")]
TABULAR = TabularModel(TokenGrid(4, 5), 4, order=7, conditions=2, dependence=0.3)
LABELS = torch.tensor([1, 0, 1])
LLAMAGEN = make(grid_size=4, vocab_size=6)
CAPTIONS = text_condition(3, [3, 5, 1])
PLAIN, GUIDED = TokenLaw(), TokenLaw(guidance_scale=2.0, top_k=3, temperature=0.9)
MODELS = [
    pytest.param(TABULAR, LABELS, PLAIN, id="tabular"),
    pytest.param(TABULAR, LABELS, GUIDED, id="tabular-guided"),
    pytest.param(LLAMAGEN, CAPTIONS, GUIDED, id="llamagen-guided"),
]


def decode(sampler, model: Any = TABULAR, condition: Any = LABELS, law: TokenLaw = PLAIN, **options):
    options = {"batch_size": 3, "generator": torch.Generator().manual_seed(0), **options}
    return sampler(model, condition, law=law, **options)


@dataclass
class Scorer:
    """Logits of what one sample feeds, computed from scratch in every call."""

    model: Any
    condition: Any
    sample: int
    guided: bool
    events: list[tuple[int, int, set[int]]] = field(default_factory=list)  # token, slot, events seen
    latest: dict[int, int] = field(default_factory=dict)

    def feed(self, fed: list[tuple[int, int, frozenset[int]]]) -> Tensor:
        """Logits [columns, 1 or 2, V] of (token, slot, slots seen)."""
        before = len(self.events)
        for index, (_, slot, _) in enumerate(fed):
            assert self.latest.get(slot, -1) < before, "a slot is fed twice in one call"
            self.latest[slot] = before + index
        self.events += [(token, slot, {self.latest[s] for s in seen}) for token, slot, seen in fed]
        parts = range(2 if self.guided else 1)
        if isinstance(self.model, LlamaGenTransformer):
            rows = [
                event_logits(self.model, self.condition, self.sample, bool(part), self.events)[before:]
                for part in parts
            ]
            return torch.stack(rows, 1)
        size, rows = self.model.vocab_size, []
        for token, slot, seen in fed:
            index = 0
            for other in range(slot - self.model.order + 1, slot + 1):
                digit = token if other == slot else 0 if other < 0 else size - 1
                if other in seen:
                    digit = self.events[self.latest[other]][0]
                index = size * index + digit
            tables = [int(self.condition[self.sample]), self.model.conditions][: len(parts)]
            following = min(slot + 1, self.model.grid.num_tokens - 1)
            rows.append(self.model.logits[tables, following, index])
        return torch.stack(rows)


@dataclass
class Decoded:
    tokens: list[int]
    commit_call: list[int]
    calls: int
    used: Tensor  # [L, V]


Rule = Callable[..., int]


class Loop:
    """One sample, decoded slot by slot as the papers say."""

    def __init__(self, order: RowOrder, model, condition, law: TokenLaw, sample: int, key: Tensor):
        self.order, self.law, self.width = order, law, order.width
        self.sim = Simulation(order)
        self.scorer = Scorer(model, condition, sample, law.guided)
        self.noise = CounterNoise(key, "cpu")
        self.model = model
        state = model.prefill(condition, batch_size=3, guided=law.guided, window=1)
        self.tokens: dict[int, int] = {}
        self.commit_call: dict[int, int] = {}
        self.used: dict[int, Tensor] = {}
        self.drafts: dict[int, tuple[int, Tensor | None]] = {}  # by slot: token, law
        self.round = 0
        first = self.target(state.logits[sample::3], 0)
        self.settle(0, self.draw(first, 0, TOKEN), first)

    def target(self, logits: Tensor, slot: int) -> Tensor:
        """Log-probabilities [V] from logits [1 or 2, V]."""
        return self.law(logits[:, None], self.law.guided, torch.tensor([[slot]]))[0, 0]

    def draw(self, law: Tensor, slot: int, stream: int, round: int = 0) -> int:
        return int(self.noise.categorical(law[None, None], torch.tensor([[slot]]), stream, round))

    def uniform(self, slot: int, stream: int) -> float:
        return float(self.noise.uniform(torch.tensor([[slot]]), stream, self.round, torch.float64))

    def keeps(self, slot: int, token: int, target: Tensor, label: Tensor) -> bool:
        return self.uniform(slot, ACCEPT) < float(target[token].exp() / label[token].exp())

    def replace(self, slot: int, target: Tensor, label: Tensor | None) -> int:
        rest = target.exp() - (0 if label is None else label.exp())
        if float(rest.clamp(min=0).sum()) == 0:
            rest = target.exp()
        return self.draw((rest.clamp(min=0) / rest.clamp(min=0).sum()).log(), slot, RESIDUAL, self.round)

    def settle(self, slot: int, token: int, target: Tensor) -> None:
        self.tokens[slot], self.commit_call[slot], self.used[slot] = token, self.round, target

    def run(self, rule: Rule) -> Decoded:
        calls = 1
        while len(self.tokens) < self.order.rows * self.width:
            columns = self.sim.call()
            flat = [column for row in columns for column in columns[row]]
            known = {**{slot: token for slot, (token, _) in self.drafts.items()}, **self.tokens}
            logits = self.scorer.feed([(known[source], slot, seen) for source, slot, _, seen in flat])
            calls += 1
            self.round += 1
            laws = {
                predicted: self.target(row, predicted)
                for row, (_, _, predicted, _) in zip(logits, flat, strict=True)
                if predicted >= 0
            }
            slots = {row: [c[2] for c in columns[row] if c[2] >= 0] for row in columns}
            counts = {row: rule(self, row, slots[row], laws) for row in columns if slots[row]}
            self.sim.commit(counts, columns)
            self.after(laws)
        order = sorted(self.tokens)
        return Decoded(
            [self.tokens[s] for s in order],
            [self.commit_call[s] for s in order],
            calls,
            torch.stack([self.used[s] for s in order]),
        )

    def after(self, laws: dict[int, Tensor]) -> None:
        """What happens at the end of a call; nothing in ZipAR."""


def zipar(loop: Loop, row: int, slots: list[int], laws: dict[int, Tensor]) -> int:
    (slot,) = slots
    loop.settle(slot, loop.draw(laws[slot], slot, TOKEN), laws[slot])
    return 1


def adaptive(loop: Loop, row: int, slots: list[int], laws: dict[int, Tensor]) -> int:
    (slot,) = slots
    target = laws[slot]
    final = row == 0 or slot % loop.width > 0 or loop.sim.lengths[row - 1] == loop.width
    if slot not in loop.drafts:
        token, kept = loop.draw(target, slot, TOKEN), False
    else:
        token, label = loop.drafts[slot]
        assert label is not None
        kept = loop.keeps(slot, token, target, label)
        token = token if kept else loop.replace(slot, target, label)
    if final or kept:
        loop.settle(slot, token, target)
        return 1
    loop.drafts[slot] = (token, target)
    return 0


class JacobiLoop(Loop):
    """Drafts after every row's newest token, drawn again after every call."""

    def __init__(self, settings: Any, *arguments):
        super().__init__(*arguments)
        self.settings = settings
        self.candidates: dict[int, int] = {}
        self.after({})

    def rule(self, _, row: int, slots: list[int], laws: dict[int, Tensor]) -> int:
        gumbel, maximal = (self.settings.coupling == name for name in ("gumbel", "maximal"))
        count, stopped = 0, False
        for slot in slots:
            draft, label = self.drafts[slot] if slot != slots[-1] else (None, None)
            if self.settings.acceptance == "identical":
                token = self.draw(laws[slot], slot, TOKEN)
                kept = token == draft
            else:
                kept = draft is not None and self.keeps(slot, draft, laws[slot], label)  # type: ignore[arg-type]
                token = draft if kept else None
                if not kept and (maximal or not stopped):
                    token = self.replace(slot, laws[slot], label)
            if not stopped:
                assert token is not None
                self.settle(slot, token, laws[slot])
                count += 1
            elif maximal:
                assert token is not None
                self.candidates[slot] = token
            elif gumbel:
                self.candidates[slot] = self.draw(laws[slot], slot, TOKEN)
            else:
                self.candidates[slot] = self.draw(laws[slot], slot, DRAFT, self.round)
            stopped = stopped or not kept
        return count

    def after(self, laws: dict[int, Tensor]) -> None:
        self.drafts = {}
        for row in self.sim.open:
            length = self.sim.lengths[row]
            for c in range(length, min(length + self.order.drafts, self.width)):
                slot = row * self.width + c
                if slot in laws:
                    self.drafts[slot] = (self.candidates[slot], laws[slot])
                    continue
                size = self.model.vocab_size
                if self.settings.initial_draft == "uniform":
                    token = int(self.uniform(slot, DRAFT) * size)
                    label = torch.full((size,), 1 / size, dtype=torch.float64).log()
                else:
                    token = self.copied(row, c)
                    label = torch.eye(size, dtype=torch.float64)[token].log()
                self.drafts[slot] = (token, label)
        self.candidates = {}

    def copied(self, row: int, c: int) -> int:
        above = self.sim.lengths[row - 1] if row else 0
        if self.settings.initial_draft == "up" and row:
            return self.tokens.get((row - 1) * self.width + c, 0)
        if self.sim.lengths[row]:
            return self.tokens[row * self.width + self.sim.lengths[row] - 1]
        return self.tokens[(row - 1) * self.width + above - 1] if above else 0


def check(result, loops: list[Decoded]) -> None:
    for b, want in enumerate(loops):
        assert result.tokens[b].tolist() == want.tokens
        assert result.trace.commit_call[b].tolist() == want.commit_call
        assert int(result.trace.target_calls[b]) == want.calls


def raster_distance(model, condition, law: TokenLaw, loops: list[Decoded]) -> float:
    """Mean total variation between the laws the loops used and the laws of a plain pass over their tokens."""
    tokens = torch.tensor([want.tokens for want in loops])
    length = tokens.shape[1]
    slots = torch.arange(length).repeat(len(loops), 1)
    state = model.prefill(condition, batch_size=len(loops), guided=law.guided, window=length)
    logits = torch.cat([state.logits[:, None], model(state, tokens, slots)[:, :-1]], 1)
    raster = law(logits, law.guided, slots).exp()
    used = torch.stack([want.used for want in loops]).exp()
    return float((raster - used).abs().sum(-1).mean() / 2)


KEYS = draw_keys(torch.Generator().manual_seed(0), 3)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("rule", [zipar, adaptive])
@pytest.mark.parametrize(("model", "condition", "law"), MODELS)
def test_zipar_is_what_the_loop_says(model, condition, law, rule, window):
    order = RowOrder.over(model.grid, window)
    loops = [Loop(order, model, condition, law, b, KEYS[b, None]).run(rule) for b in range(3)]
    sampler = ZipARSampler(window, adaptive=rule is adaptive, measure=True)
    result = decode(sampler, model, condition, law)
    check(result, loops)
    assert not result.trace.lossless and not result.trace.identical
    assert result.trace.divergence == pytest.approx(raster_distance(model, condition, law, loops), abs=1e-12)
    if rule is zipar:
        assert (result.trace.target_calls == order.calls).all()
    else:
        assert result.trace.target_calls.min() > order.calls
    # When a start at width - 1 is confirmed the row above is complete: that is raster order.
    assert (result.trace.divergence or 0) > 1e-3 or (rule is adaptive and window == model.grid.width - 1)


@pytest.mark.parametrize("initial_draft", ROW_DRAFTS)
@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
@pytest.mark.parametrize(("rows", "drafts", "lead"), [(3, 2, 1), (2, 4, 2), (4, 1, 4)])
def test_parallel_jacobi_is_what_the_loop_says(rows, drafts, lead, coupling, acceptance, initial_draft):
    check_parallel_jacobi(TABULAR, LABELS, PLAIN, (rows, drafts, lead, coupling, acceptance, initial_draft))


@pytest.mark.parametrize(("coupling", "acceptance"), COMBINATIONS)
def test_parallel_jacobi_on_the_transformer_is_what_the_loop_says(coupling, acceptance):
    check_parallel_jacobi(LLAMAGEN, CAPTIONS, GUIDED, (3, 2, 1, coupling, acceptance, "up"))


def check_parallel_jacobi(model, condition, law: TokenLaw, settings: tuple[Any, ...]) -> None:
    sampler = ParallelJacobiSampler(*settings, measure=True)
    rows, drafts, lead, *_ = settings
    order = RowOrder.over(model.grid, lead, windows=rows, drafts=drafts)
    loops = []
    for b in range(3):
        loop = JacobiLoop(sampler.config, order, model, condition, law, b, KEYS[b, None])
        loops.append(loop.run(JacobiLoop.rule.__get__(loop)))
    result = decode(sampler, model, condition, law)
    check(result, loops)
    assert result.trace.divergence == pytest.approx(raster_distance(model, condition, law, loops), abs=1e-12)


SAMPLERS = [
    *(ZipARSampler(window, adaptive) for window in (1, 3) for adaptive in (False, True)),
    *(ParallelJacobiSampler(3, 2, 2, *combination, "left") for combination in COMBINATIONS),
]


@pytest.mark.parametrize(("model", "condition", "law"), MODELS)
def test_a_lead_of_the_width_gives_the_tokens_of_autoregressive_sampling(model, condition, law):
    want = decode(AutoregressiveSampler(), model, condition, law).tokens
    width = model.grid.width
    for lead in (width, width + 3):
        for adaptive_start in (False, True):
            result = decode(ZipARSampler(lead, adaptive_start, measure=True), model, condition, law)
            assert torch.equal(result.tokens, want)
            assert (result.trace.target_calls == model.grid.num_tokens).all()
            assert result.trace.divergence is not None and result.trace.divergence < 1e-12
        for rows, drafts in ((1, 1), (3, 2), (2, width + 2)):
            sampler = ParallelJacobiSampler(rows, drafts, lead)
            assert torch.equal(decode(sampler, model, condition, law).tokens, want)


class Poisoned(LlamaGenTransformer):
    """Before every call fills the slots that no column sees with garbage."""

    def forward(self, state, tokens, slots, visible=None, seen=None, predicted=None):
        assert seen is not None
        unseen = ~seen.any(1)  # [B, L]
        prefix = state.prefix_mask.shape[1]
        for row in range(len(state.prefix_mask)):
            at = prefix + unseen[row % len(unseen)].nonzero()[:, 0]
            for cache in state.cache.buffers():
                cache[:, row, :, at] = 30 * torch.randn_like(cache[:, row, :, at])
        return super().forward(state, tokens, slots, visible, seen, predicted)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_slots_that_are_not_seen_may_hold_anything(sampler):
    want = decode(sampler, LLAMAGEN, CAPTIONS, GUIDED)
    poisoned: Any = Poisoned.from_config(LLAMAGEN.config)
    poisoned = poisoned.double().eval()
    poisoned.load_state_dict(LLAMAGEN.state_dict())
    found = decode(sampler, poisoned, CAPTIONS, GUIDED)
    assert torch.equal(found.tokens, want.tokens)
    assert torch.equal(found.trace.commit_call, want.trace.commit_call)


def test_drafts_save_calls_and_rows_save_more():
    model = TabularModel(TokenGrid(8, 8), 8, order=3, conditions=2, dependence=0.05)
    calls = [
        decode(sampler, model).trace.target_calls.float().mean()
        for sampler in (
            ParallelJacobiSampler(1, 3, 8),
            ParallelJacobiSampler(3, 3, 2),
            ParallelJacobiSampler(8, 3, 1),
        )
    ]
    assert calls[0] < 40 and calls[1] < 0.6 * calls[0] and calls[2] < 0.9 * calls[1]


def test_refuses_a_coupling_that_the_acceptance_cannot_use():
    with pytest.raises(ValueError, match="acceptance='identical' .* coupling='maximal'"):
        ParallelJacobiSampler(coupling="maximal")


def test_rows_run_through_frames():
    model = TabularModel(TokenGrid(2, 4, frames=2), 3, order=5, conditions=2)
    result = decode(ZipARSampler(2), model)
    assert (result.trace.target_calls == 4 + 3 * 2).all()
    assert torch.equal(decode(ZipARSampler(4), model).tokens, decode(AutoregressiveSampler(), model).tokens)


# Likeliest tokens of the public code (github.com/ThisisBillhe/ZipAR, `generate_zipar.generate` with top_k=1) on the
# weights of `random_weights`, for labels 3 and 6, by window and guidance. Its attention was told to leave out slots
# without a token and other rows' stand-ins, which it reads as zeros and as they stand.
RELEASED = {
    (2, 1.0): [
        [8, 2, 7, 2, 9, 2, 9, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [11, 7, 11, 11, 11, 3, 4, 11, 1, 11, 10, 1, 0, 4, 9, 2],
    ],
    (2, 2.0): [
        [8, 2, 11, 2, 11, 5, 2, 11, 11, 8, 2, 4, 8, 2, 2, 2],
        [11, 9, 9, 0, 8, 6, 0, 2, 3, 10, 6, 0, 11, 9, 2, 0],
    ],
    (3, 1.0): [
        [8, 2, 7, 2, 9, 2, 9, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [11, 7, 11, 11, 11, 3, 4, 11, 5, 11, 10, 0, 0, 2, 2, 2],
    ],
    (3, 2.0): [
        [8, 2, 11, 2, 11, 5, 2, 11, 11, 8, 2, 4, 8, 8, 8, 8],
        [11, 9, 9, 0, 8, 6, 0, 2, 3, 10, 6, 0, 11, 9, 2, 0],
    ],
}


@pytest.mark.parametrize(("window", "scale"), RELEASED)
def test_as_released_draws_the_tokens_of_the_public_code(window, scale):
    config: dict[str, Any] = dict(
        vocab_size=12, dim=16, num_layers=2, num_heads=2, grid_size=4, num_classes=7
    )
    model: Any = LlamaGenTransformer(**config).double().eval()
    model.load_state_dict(random_weights(transformer_shapes(2, 16, vocab=12, classes=7), torch.float64))
    law = TokenLaw(guidance_scale=scale, top_k=1)
    both = [
        ZipARSampler(window, as_released=released)(model, torch.tensor([3, 6]), law=law, batch_size=2)
        for released in (True, False)
    ]
    assert both[0].tokens.tolist() == RELEASED[window, scale]
    assert both[0].trace.target_calls.tolist() == [4 + 4 + 2 * window] * 2  # row 0, row 1, and two more
    assert both[1].trace.target_calls.tolist() == [4 + 3 * window] * 2
    assert not torch.equal(both[0].tokens, both[1].tokens)
