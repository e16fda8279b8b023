"""Hybrid decoding: the beginning of a clip is drawn column by column, the rest by masked decoding.

Ziv et al., "Masked audio generation using a single non-autoregressive transformer" (MAGNeT), ICLR 2024: MusicGen
generates the beginning of a clip, and MAGNeT continues it. The released code takes a prompt but has no such decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.core.masked_protocol import MaskedModel
from visual_spec.models.core.protocol import ClipModel
from visual_spec.samplers.core.base import STOP, Callback
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import draw_keys
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.state import MaskedTrace


def hybrid_decode(
    sampler: MaskedSampler,
    model: MaskedModel,
    condition: Any,
    *,
    law: TokenLaw,
    first: ClipModel,
    first_sampler: Any,
    first_law: TokenLaw,
    first_condition: Any = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    batch_size: int = 1,
    callback: Callback | None = None,
    **options: Any,
) -> SampleResult:
    """Decode the beginning of clips column by column, and the rest by masked decoding (MAGNeT's hybrid).

    Args:
        sampler, model, condition, law: of the masked part.
        first: model of the beginning; its clips have P frames.
        first_sampler: sampler of the beginning, such as a `ColumnAutoregressiveSampler` or `ColumnJacobiSampler`.
        first_law, first_condition: of the beginning. The condition defaults to that of the masked part.
        generator, batch_size: as in the samplers. Each sample's key seeds the keys of both parts.
        callback: called after every target call of both parts, with one running index. The numbers are the columns of
            the beginning, then those of `MaskedSampler`. `STOP` takes effect in the masked part.
        options: the other arguments of `MaskedSampler.__call__`, except `given`.

    Returns:
        As `MaskedSampler`; the trace covers both parts.

    Raises:
        ValueError, TypeError: as in the samplers; or the beginning covers the whole clip, or has other codes.
    """
    grid = model.grid
    if first.grid.codebooks != grid.codebooks or first.vocab_size != model.vocab_size:
        raise ValueError(
            f"the first model has {first.grid.codebooks} codebooks of {first.vocab_size} codes, and the masked one "
            f"{grid.codebooks} of {model.vocab_size}; pass two models of the same codec."
        )
    count = first.num_frames
    if count >= grid.num_tokens:
        raise ValueError(
            f"the first model decodes {count} frames of clips of {grid.num_tokens}; pass one made for fewer frames, so "
            "that some are left to the masked model."
        )
    # One key per sample seeds both parts, so that a sample does not depend on the batch.
    keys = draw_keys(generator, batch_size).tolist()
    generators = [torch.Generator().manual_seed(key & (2**63 - 1)) for key in keys]
    own = condition if first_condition is None else first_condition
    stopped = False

    def earlier(call: int, lengths: Tensor) -> None:
        nonlocal stopped
        assert callback is not None
        stopped |= callback(call, lengths) is STOP

    beginning = first_sampler(
        first,
        own,
        law=first_law,
        generator=generators,
        batch_size=batch_size,
        callback=None if callback is None else earlier,
    )
    codes = first.codes(beginning.tokens, own)  # [B, K, P]
    given = torch.full((batch_size, grid.num_tokens, grid.codebooks), model.mask_id, device=codes.device)
    given[:, :count] = codes.transpose(1, 2)
    offset = int(beginning.trace.target_calls.max())

    def later(call: int, lengths: Tensor) -> Any:
        assert callback is not None
        return STOP if stopped else callback(offset + call, lengths)

    result = sampler(
        model,
        condition,
        law=law,
        generator=generators,
        batch_size=batch_size,
        callback=None if callback is None else later,
        given=given,
        **options,
    )
    return SampleResult(result.tokens, _joined(beginning.trace, result.trace, first, own))


def _joined(before: Any, trace: Any, first: ClipModel, condition: Any) -> MaskedTrace:
    """Return the trace of both parts: `before` of the columns of the beginning, `trace` of the masked part."""
    assert isinstance(trace, MaskedTrace)
    count, calls = first.num_frames, before.target_calls
    # Map calls from columns to frames, as for codes. Entries that do not shift with the calls were given.
    by_column = before.commit_call[..., None].expand(-1, -1, first.grid.codebooks)
    found, moved = (first.codes(by_column + shift, condition).transpose(1, 2).cpu() for shift in (0, 1))
    entry_call = torch.where(trace.entry_call < 0, -1, trace.entry_call + calls[:, None, None])
    entry_call[:, :count] = torch.where(moved > found, found, -1)
    commit_call = entry_call.amax(-1).clamp(min=0)
    phases = {f"first {name}": seconds for name, seconds in before.phase_seconds.items()}
    return replace(
        trace,
        target_calls=trace.target_calls + calls,
        commit_call=torch.where(trace.commit_call < 0, -1, commit_call),
        seconds=trace.seconds + before.seconds,
        phase_seconds=phases | trace.phase_seconds,
        entry_call=entry_call,
        first_calls=calls,
    )
