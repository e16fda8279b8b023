"""Samples that are complete leave the batch: fewer rows are fed, and nothing else changes."""

from typing import Any

import pytest
import torch

from tests.helpers.cached_decoders import case, rows_of
from tests.helpers.drafting import (
    CONDITION,
    GUIDED,
    MODEL,
    NEAR,
    captions,
    counting,
    decode,
    draft_model,
    eagle_pair,
    seeded,
)
from tests.helpers.sampler_settings import lossy
from tests.helpers.tabular import TabularModel, TabularState
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import ActiveSamples
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler

JACOBI = [
    SpeculativeJacobiSampler(8),
    SpeculativeJacobiSampler(8, "maximal", "exact"),
    SpeculativeJacobiSampler(8, "independent", **lossy("grouped", code_distance=None)),
    ProactiveJacobiSampler(window=6, siblings=2, depth=2),
]
DRAFTED = [DraftedSampler(3), TreeSampler(depth=2, width=3)]


def same(one: Any, other: Any) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.trace.target_calls, other.trace.target_calls)
    assert torch.equal(one.trace.commit_call, other.trace.commit_call)
    assert one.trace.divergence == other.trace.divergence
    if one.trace.moved_mass is not None:
        assert torch.equal(one.trace.moved_mass, other.trace.moved_mass)


@pytest.mark.parametrize("law", [TokenLaw(), GUIDED])
@pytest.mark.parametrize("sampler", JACOBI + DRAFTED)
def test_the_result_is_that_of_the_whole_batch(request, sampler, law):
    model, heard = counting(MODEL), []
    more = {"drafter": NEAR} if sampler in DRAFTED else {}
    ask = {"condition": CONDITION, "law": law, "batch_size": 4}

    def listen(call, lengths):
        heard.append((call, lengths.tolist()))

    small = sampler(model, **ask, **more, generator=seeded(range(4)), callback=listen)
    fed, said = [len(slots) for slots in model.calls], list(heard)
    request.getfixturevalue("whole_batch")
    heard.clear()
    whole = sampler(model, **ask, **more, generator=seeded(range(4)), callback=listen)
    same(small, whole)
    assert said == heard
    # Rows are fed until they are complete, and not once more.
    assert sum(fed) == int(small.trace.target_calls.sum()) - 4
    assert fed == sorted(fed, reverse=True) and fed[-1] < 4
    assert sum(len(slots) for slots in model.calls) == 4 * int(small.trace.target_calls.max() - 1)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("kind", ["jacobi", "eagle", "tree", "draft model"])
def test_transformers_let_samples_go(request, monkeypatch, kind, guided):
    target, eagle = eagle_pair()
    sampler: Any = {"jacobi": SpeculativeJacobiSampler(6), "tree": TreeSampler(depth=2, width=3)}.get(
        kind, DraftedSampler(3)
    )
    more: dict[str, Any] = {} if kind == "jacobi" else {"drafter": eagle}
    if kind == "draft model":
        more = {"drafter": draft_model(), "drafter_condition": captions(5)}
    ask = {"law": TokenLaw(guidance_scale=2.0 if guided else 1.0), "batch_size": 5}
    sizes: list[int] = []
    forward = target.forward
    monkeypatch.setattr(
        target,
        "forward",
        lambda state, tokens, *rest: sizes.append(len(tokens)) or forward(state, tokens, *rest),
    )
    small = sampler(target, captions(5), **ask, **more, generator=seeded(range(5)))
    assert min(sizes) < 5 == max(sizes)
    request.getfixturevalue("whole_batch")
    same(small, sampler(target, captions(5), **ask, **more, generator=seeded(range(5))))


@pytest.mark.parametrize("family", ["janus", "emu3"])
def test_adapters_let_samples_go(request, family):
    model, condition = case(family)
    condition = rows_of(condition, [0, 1, 1, 0])
    ask = {"law": TokenLaw(guidance_scale=2.0), "batch_size": 4}
    small = SpeculativeJacobiSampler(5)(model, condition, **ask, generator=seeded(range(4)))
    assert small.trace.target_calls.unique().numel() > 1
    request.getfixturevalue("whole_batch")
    same(small, SpeculativeJacobiSampler(5)(model, condition, **ask, generator=seeded(range(4))))


def test_messages_keep_the_numbers_of_samples():
    """The sample that is found bad when others have left is named as the user knows it."""
    sampler = SpeculativeJacobiSampler(8, drafts="carried")
    calls = sampler(
        MODEL, CONDITION, law=TokenLaw(), batch_size=4, generator=seeded(range(4))
    ).trace.target_calls
    last = int(calls.argmax())
    assert (calls == calls[last]).sum() == 1

    class Late(TabularModel):
        def forward(self, state, tokens, slots, visible=None, seen=None):
            logits = super().forward(state, tokens, slots, visible, seen)
            if len(slots) == 1:
                logits[:, 0] = torch.nan
            return logits

    model = Late(MODEL.grid, MODEL.vocab_size, order=MODEL.order, conditions=MODEL.conditions)
    model.logits = MODEL.logits
    with pytest.raises(FloatingPointError, match=f"sample {last} "):
        sampler(model, CONDITION, law=TokenLaw(), batch_size=4, generator=seeded(range(4)))


def test_large_batches_leave_in_groups():
    state = decode_state(16)
    active = ActiveSamples(state)
    assert active.can_shrink
    active.leave(torch.arange(16) % 3 == 0, state.lengths)
    assert state.tokens[:, 0].tolist() == [n for n in range(16) if n % 3]
    state.lengths += 5
    active.leave(torch.arange(10) < 4, state.lengths)
    state.lengths += 5
    left = [n for n in range(16) if n % 3][4:]
    expected = [0 if n % 3 == 0 else 10 if n in left else 5 for n in range(16)]
    assert active.whole("progress", state.lengths).tolist() == expected
    assert active.whole("tokens", state.tokens)[:, 0].tolist() == list(range(16))


def decode_state(batch_size: int) -> Any:
    from visual_spec.samplers.raster.jacobi import JacobiState

    zeros = torch.zeros(batch_size, dtype=torch.long)
    cache = TabularState(torch.zeros(batch_size, 2), False, 1, torch.zeros(batch_size, 3).long(), zeros)
    tokens = torch.arange(batch_size)[:, None].repeat(1, 3)
    return JacobiState(cache, tokens, zeros.clone(), 0, zeros.clone(), tokens.clone(), None)


def test_a_state_that_cannot_shrink_is_left_whole(request):
    request.getfixturevalue("whole_batch")
    assert not ActiveSamples(decode_state(2)).can_shrink
    assert decode(DraftedSampler(3)).tokens.shape == (4, 36)
