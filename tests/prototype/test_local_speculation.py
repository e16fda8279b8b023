"""Multi-scale drafting: exact without pooling and locality, else equal to the definition written out in loops."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.refusals import refuses
from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.prototype.local_speculation.drafter import MultiscaleDrafter, TokenUpsampler
from visual_spec.prototype.local_speculation.sampler import MultiscaleSampler, later_neighbours
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, CounterNoise, draw_keys


class TableUpsampler(nn.Module):
    """Logits of every large token by the first small one."""

    def __init__(self, vocab_size: int, num_tokens: int, scale: float = 1.0):
        super().__init__()
        self.num_tokens = num_tokens
        generator = torch.Generator().manual_seed(5)
        self.table = scale * torch.randn(
            vocab_size, num_tokens, vocab_size, generator=generator, dtype=torch.float64
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens[:, 0]]


def drafter(vocab_size: int, num_tokens: int, scale: float = 1.0) -> Any:
    small = TabularModel(TokenGrid(1, 2), vocab_size, seed=9)
    return SimpleNamespace(transformer=small, upsampler=TableUpsampler(vocab_size, num_tokens, scale))


def by_loops(
    model: TabularModel, parts: Any, key: Tensor, codebook: Tensor, pool: int, radius: int, rounds: int
) -> tuple[list[int], int, float, int]:
    """One sample by the definition: tokens, target calls, the mass that pooling moved, the slots tested."""
    noise = CounterNoise(key, "cpu")
    length, width, vocab = model.grid.num_tokens, model.grid.width, model.vocab_size

    def draw(law: Tensor, slot: int, stream: int, round: int) -> int:
        return int(noise.categorical(law[None, None], torch.tensor([[slot]]), stream, round))

    state = parts.transformer.prefill(None, batch_size=1, guided=False, window=1)
    logits, small = state.logits[0], []
    for slot in range(parts.transformer.grid.num_tokens):
        small.append(draw(logits.log_softmax(-1), slot, DRAFT, 1))
        logits = parts.transformer(state, torch.tensor([[small[-1]]]), torch.tensor([[slot]]))[0, 0]
    labels = parts.upsampler(torch.tensor([small]))[0].log_softmax(-1)
    tokens = [draw(labels[slot], slot, DRAFT, 0) for slot in range(length)]
    near = [
        sorted(range(vocab), key=lambda v: (v != c, float((codebook[c] - codebook[v]).norm())))[:pool]
        for c in range(vocab)
    ]
    watched, calls, moved, tested = set(range(length)), 1, 0.0, 0
    for round in range(1, rounds + 1):
        if not watched:
            break
        calls += 1
        targets = []
        for slot in range(length):
            context = 0
            for token in tokens[max(0, slot - model.order) : slot]:
                context = context * vocab + token
            targets.append(model.logits[0, slot, context].log_softmax(-1))
        refused, following = [], list(tokens)
        for slot in sorted(watched):
            p, q, token = targets[slot].exp(), labels[slot].exp(), tokens[slot]
            accept = min(1.0, float(p[near[token]].sum() / q[near[token]].sum()))
            moved += max(0.0, accept - float(p[token] / q[token]))
            tested += 1
            if not noise.bernoulli(
                torch.tensor([[accept]], dtype=torch.float64), torch.tensor([[slot]]), ACCEPT, round
            ):
                refused.append(slot)
                rest = (p - q).clamp(min=0)
                following[slot] = draw((rest / rest.sum()).log(), slot, RESIDUAL, round)
        for slot in watched:
            labels[slot] = targets[slot]
        tokens = following
        watched = {
            b
            for a in refused
            for b in range(a + 1, length)
            if abs(a // width - b // width) <= radius and abs(a % width - b % width) <= radius
        }
    return tokens, calls, moved, tested


def test_relaxed_decoding_is_the_definition_in_loops():
    model = TabularModel(TokenGrid(3, 3), 5, order=2, seed=1)
    parts = drafter(5, 9)
    codebook = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    sampler = MultiscaleSampler(pool=2, radius=1, max_rounds=3)
    assert sampler.needs_codebook and not sampler.lossless
    keys = draw_keys(torch.Generator().manual_seed(4), 6)
    result = sampler(
        model,
        None,
        law=TokenLaw(),
        drafter=parts,
        codebook=codebook,
        batch_size=6,
        generator=torch.Generator().manual_seed(4),
    )
    wanted: list[Any] = [by_loops(model, parts, key[None], codebook, 2, 1, 3) for key in keys]
    assert result.tokens.tolist() == [tokens for tokens, *_ in wanted]
    assert result.trace.target_calls.tolist() == [calls for _, calls, *_ in wanted]
    assert result.trace.divergence is not None
    moved, tested = (sum(one[place] for one in wanted) for place in (2, 3))
    assert abs(result.trace.divergence - moved / tested) < 1e-9
    assert len(set(result.trace.target_calls.tolist())) > 1  # rows end at their own pace


def test_a_perfect_guess_takes_one_verification():
    model = TabularModel(TokenGrid(2, 2), 3, order=0, seed=2)
    parts = drafter(3, 4)
    parts.upsampler.table = model.logits[0, :, 0].expand(3, -1, -1)
    result = MultiscaleSampler(pool=1)(model, None, law=TokenLaw(), drafter=parts, batch_size=5)
    assert result.trace.target_calls.tolist() == [2] * 5


def test_neighbourhoods_lie_after_a_slot():
    near = later_neighbours(TokenGrid(3, 3), 1)
    assert near[4].nonzero()[:, 0].tolist() == [5, 6, 7, 8]
    assert near[2].nonzero()[:, 0].tolist() == [4, 5]
    assert later_neighbours(TokenGrid(3, 3), None)[2].nonzero()[:, 0].tolist() == list(range(3, 9))


def test_what_does_not_fit_is_refused_before_compute():
    model = TabularModel(TokenGrid(2, 2), 3)
    sampler = MultiscaleSampler(pool=2)
    codebook = torch.randn(3, 2)
    refuses(ValueError, "MultiscaleDr", sampler, model, None, law=TokenLaw(), codebook=codebook)
    with pytest.raises(ValueError, match="9 tokens.*3.*4.*3"):
        sampler(model, None, law=TokenLaw(), drafter=drafter(3, 9), codebook=codebook)
    with pytest.raises(ValueError, match="3 tokens.*4"):
        sampler(model, None, law=TokenLaw(), drafter=drafter(3, 4), codebook=torch.randn(4, 2))


def test_upsampler_keeps_places_and_drafter_checks_its_halves():
    torch.manual_seed(0)
    up = TokenUpsampler(vocab_size=12, low_side=4, factor=2, width=8, num_blocks=1).eval()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 15] = 3  # the lower right corner
    moved = (up(tokens) - up(changed)).abs().amax(-1).view(8, 8)
    assert up(tokens).shape == (1, 64, 12) and up.num_tokens == 64
    assert moved[6:, 6:].min() > 0 and moved[6:, 6:].mean() > 3 * moved[:3, :3].mean()
    small = {"vocab_size": 12, "dim": 16, "num_layers": 1, "num_heads": 2, "grid_size": 3}
    refuses(ValueError, "3 x 3.*12", MultiscaleDrafter, small, dict(up.config))


def test_a_call_tests_open_slots_only_and_is_the_last_of_what_it_tests():
    model, guess = TabularModel(TokenGrid(4, 4), 6, order=2), drafter(6, 16)
    sampler = MultiscaleSampler(pool=1, radius=1, max_rounds=5)
    run = sampler.begin(model, None, TokenLaw(), torch.arange(6), drafter=guess)
    state = sampler.prepare(run)
    last, calls, ragged = torch.zeros(6, 16, dtype=torch.long), torch.ones(6, dtype=torch.long), False
    for round in range(1, 6):
        before, tokens, label = state.open.clone(), state.tokens.clone(), state.label.clone()
        sampler.step(run, state)
        last[before], calls = round, calls + before.any(1)
        ragged |= bool(before.any() and not before.all())
        assert torch.equal(state.commit_call, last) and torch.equal(state.target_calls, calls)
        assert torch.equal(state.tokens[~before], tokens[~before])
        assert torch.equal(state.label[~before], label[~before])
        slots = torch.arange(16).expand(6, -1)
        cache = model.prefill(None, batch_size=6, guided=False, window=16)
        logits = torch.cat([cache.logits[:, None], model(cache, tokens[:, :-1], slots[:, :-1])], 1)
        torch.testing.assert_close(state.label[before], logits.log_softmax(-1)[before])
    assert ragged and not state.open.any()  # the rounds are used up
