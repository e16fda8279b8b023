"""The window of a serving engine against the samplers: its tokens, and its calls."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tabular import TabularModel
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.served import WindowMemory, verify_window

BATCH, VOCAB = 40, 5
KEYS = draw_keys(torch.Generator().manual_seed(0), BATCH)


def laws(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)


MODEL = TabularModel(TokenGrid(6, 6), 12, order=2, conditions=3, dependence=0.3)
LENGTH = 36
CONDITION = torch.tensor([2, 0, 1, 2, 0])


def served(window: int, law: TokenLaw, turn: bool, repaired: bool = False) -> tuple[Tensor, Tensor]:
    """Decode as an engine would, in a loop of model calls and `verify_window`: tokens [B, L], calls [B].

    Args:
        repaired: draft by the memories of the pictures, which are split and joined between calls.
        turn: put the rows of the logits into another order before every verification, as an engine's scheduler may.
    """
    batch_size = len(CONDITION)
    keys = draw_keys([torch.Generator().manual_seed(seed) for seed in range(batch_size)], batch_size)
    cache = MODEL.prefill(CONDITION, batch_size=batch_size, guided=law.guided, window=window)
    rows = torch.arange(2 * batch_size).view(2, -1).t() if law.guided else None
    pairs: Any = rows

    def ask(logits: Tensor, drafts: Tensor, slots: Tensor) -> Any:
        nonlocal pairs
        if turn and rows is not None:
            order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(int(slots.sum())))
            logits, pairs = logits[order], order.argsort()[rows]
        if not repaired:
            return verify_window(logits, drafts, keys, slots, law, pairs=pairs, num_drafts=window - 1)
        sampled, count, rejected, none = verify_window(
            logits, drafts, keys, slots, law, pairs=pairs, num_drafts=0
        )
        assert none.shape == (batch_size, 0)
        joined = WindowMemory.join(memories)
        joined.settle(slots, sampled, count)
        following = joined.drafts(window - 1, MODEL.grid)
        memories[:] = joined.split()
        return sampled, count, rejected, following

    memories = WindowMemory.begin(batch_size, LENGTH, window).split()
    slots = torch.zeros(batch_size, 1, dtype=torch.long)
    tokens = torch.zeros(batch_size, LENGTH + window, dtype=torch.long)
    sampled, count, rejected, drafts = ask(cache.logits[:, None], slots[:, :0], slots)
    assert count.tolist() == [1] * batch_size and rejected.tolist() == [0] * batch_size
    tokens[:, :1], lengths, calls = sampled, torch.ones_like(count), torch.ones_like(count)
    while (lengths < LENGTH).any():
        slots = lengths[:, None] + torch.arange(window)
        fed = torch.cat([tokens.gather(1, slots[:, :1] - 1), drafts], 1)
        sampled, count, rejected, drafts = ask(MODEL(cache, fed, slots - 1), drafts, slots)
        assert torch.equal(count + rejected, torch.full_like(count, window)) and drafts.shape[1] == window - 1
        going = lengths < LENGTH
        for row in going.nonzero()[:, 0].tolist():
            tokens[row, slots[row, : count[row]]] = sampled[row, : count[row]]
        calls += going
        lengths = (lengths + count * going).clamp(max=LENGTH)
    return tokens[:, :LENGTH], calls


@pytest.mark.parametrize("repaired", [False, True], ids=["carried", "repaired"])
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("window", [1, 2, 6, 40])
@pytest.mark.parametrize(
    "law", [TokenLaw(), TokenLaw(guidance_scale=2.0, top_k=6), TokenLaw(guidance_scale=2.0, guidance_until=20)],
    ids=["plain", "guided", "guided halfway"],
)  # fmt: skip
def test_a_loop_of_calls_and_verify_window_is_the_sampler(law, window, turn, repaired):
    """The tokens of plain decoding, and the calls of the Jacobi sampler that drafts alike."""
    tokens, calls = served(window, law, turn, repaired)
    options: dict[str, Any] = dict(law=law, batch_size=len(CONDITION))

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in range(len(CONDITION))]

    plain = AutoregressiveSampler()(MODEL, CONDITION, generator=generators(), **options)
    assert torch.equal(tokens, plain.tokens)
    own: dict[str, Any] = {} if repaired else {"initial_draft": "last_law", "drafts": "carried"}
    sampler = SpeculativeJacobiSampler(window, **own)
    jacobi = sampler(MODEL, CONDITION, generator=generators(), **options)
    assert torch.equal(tokens, jacobi.tokens) and torch.equal(calls, jacobi.trace.target_calls)
    assert calls.unique().numel() > 1 or window == 1
    assert window == 1 or calls.max() < LENGTH


def test_any_draft_and_none_give_the_same_tokens():
    law, slots = TokenLaw(), torch.arange(1, 5).expand(BATCH, -1)
    logits = laws(BATCH, 4, seed=11)
    sampled, *_ = verify_window(logits, torch.full((BATCH, 3), -1), KEYS, slots, law)
    for drafts in (sampled[:, :-1], torch.zeros(BATCH, 3, dtype=torch.long), sampled[:, :-1].flip(1)):
        again, count, rejected, following = verify_window(logits, drafts, KEYS, slots, law)
        assert torch.equal(again, sampled) and torch.equal(count + rejected, torch.full((BATCH,), 4))
        for row in range(BATCH):
            kept = 0
            while kept < 3 and drafts[row, kept] == sampled[row, kept]:
                kept += 1
            assert count[row] == kept + 1
            known = sampled[row, kept + 1 :].tolist()
            assert following[row].tolist()[: len(known)] == known
    assert verify_window(logits, sampled[:, :-1], KEYS, slots, law)[1].tolist() == [4] * BATCH


def test_guidance_without_pairs_is_refused():
    slots, drafts = torch.arange(2).expand(3, -1), torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"guidance_scale=2\.0.*\[B, 2\]"):
        verify_window(torch.zeros(6, 2, 4), drafts, KEYS[:3], slots, TokenLaw(guidance_scale=2.0))
