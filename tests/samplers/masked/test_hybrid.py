"""Hybrid decoding: a beginning by the autoregressive model, the rest by the masked one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.masked import FRAMES, LAW, MAGNET, STEPS, magnet, text
from tests.helpers.musicgen import musicgen
from tests.tiny import seeded
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.masked.hybrid import hybrid_decode
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.state import MaskedTrace
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler


@pytest.mark.parametrize("first_sampler", [ColumnAutoregressiveSampler(), ColumnJacobiSampler(3)])
def test_hybrid_clips_begin_as_the_first_model_has_it(first_sampler):
    model, first = magnet(), MusicgenColumnModel(musicgen(), 4)
    sampler = MaskedSampler(STEPS, **MAGNET)  # pyright: ignore[reportArgumentType]
    calls: list[int] = []
    options: dict[str, Any] = dict(
        law=LAW, first=first, first_law=TokenLaw(guidance_scale=3.0), first_sampler=first_sampler
    )
    result = hybrid_decode(
        sampler,
        model,
        text(),
        generator=seeded(1, 2, 3),
        batch_size=3,
        callback=lambda call, lengths: calls.append(call),
        **options,
    )
    keys = [torch.Generator().manual_seed(k & (2**63 - 1)) for k in draw_keys(seeded(1, 2, 3), 3).tolist()]
    columns = ColumnAutoregressiveSampler()(
        first, text(), law=TokenLaw(guidance_scale=3.0), generator=keys, batch_size=3
    )
    beginning = first.codes(columns.tokens, text())
    assert torch.equal(model.codes(result.tokens)[:, :, :4], beginning)
    rest = sampler(model, text(), law=LAW, generator=keys, batch_size=3, given=model.given(beginning))
    assert torch.equal(result.tokens, rest.tokens)
    trace = result.trace
    assert isinstance(trace, MaskedTrace) and trace.first_calls is not None
    assert torch.equal(trace.target_calls, trace.first_calls + 11)
    assert calls == sorted(set(calls)) and calls[0] == 0
    assert trace.tokens_per_call.tolist() == pytest.approx((FRAMES / trace.target_calls).tolist())
    if isinstance(first_sampler, ColumnAutoregressiveSampler):
        # Frame t of codebook k is decoded at step t + k; 7 steps make 4 frames.
        expected = torch.arange(4)[:, None] + torch.arange(4)
        assert torch.equal(trace.entry_call[0, :4], expected)
        assert (trace.entry_call[:, 4:] >= 7).all() and trace.target_calls.tolist() == [18] * 3
    alone = hybrid_decode(sampler, model, text([1]), generator=seeded(2), **options)
    assert torch.equal(alone.tokens[0], result.tokens[1])


def test_hybrid_refuses_a_beginning_that_does_not_fit():
    sampler = MaskedSampler(STEPS, **MAGNET)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = dict(
        law=LAW, first_law=TokenLaw(), first_sampler=ColumnAutoregressiveSampler(), batch_size=3
    )
    with pytest.raises(ValueError, match="decodes 10 frames of clips of 10"):
        hybrid_decode(sampler, magnet(), text(), first=MusicgenColumnModel(musicgen(), 10), **options)
    other = MusicgenColumnModel(musicgen(codebooks=2), 4)
    with pytest.raises(ValueError, match="2 codebooks of 16 codes, and the masked one 4 of 16"):
        hybrid_decode(sampler, magnet(), text(), first=other, **options)
