"""Plain and accelerated music side by side: what was decoded in which call, a mel picture, and a page with players.

A *call* is one forward of the target model, and commits a run of columns: the drafts it accepted, then one that it drew
itself. As in `report`, the last column of a run is what the call was *paid* for. A call of a masked model fills in
codes anywhere in the clip.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visual_spec.data.waves import levels
from visual_spec.eval.files import render_page
from visual_spec.eval.report.drawing import RUN_COLOURS, png_bytes
from visual_spec.eval.report.maps import entries_svg, runs_svg
from visual_spec.eval.report.pictures import paid_slots
from visual_spec.files.whole import write_atomically
from visual_spec.pipelines.audio_files import audio_bytes

# Silence to full scale; each colour is darker or lighter than the one before it.
_COLOURS = ((18, 20, 44), (70, 34, 110), (165, 48, 106), (233, 110, 60), (250, 196, 92), (252, 250, 214))
_LEAST_DECIBELS = -80.0
_WINDOW = 1024  # samples of a spectrum
_WIDTH = 1000


@dataclass
class AudioRow:
    """One prompt played plainly and accelerated.

    Attributes:
        plain_audio, fast_audio: float [C, N].
        commit_call: long [S], the call at which each column of the accelerated clip was committed.
        plain_calls, fast_calls: target calls.
        plain_seconds, fast_seconds: wall clock of the decoding, the codec not counted.
        identical: whether codes and samples of both are the same.
        promised: whether the sampler says so without a condition.
        output_law, near_ties: what the sampler says it drew from, see `DecodeTrace`.
        entry_call: of a clip that a masked model filled in: long [S, K], the call at which each code was kept.
    """

    prompt: str
    plain_audio: np.ndarray
    fast_audio: np.ndarray
    sampling_rate: int
    commit_call: Tensor
    plain_calls: int
    fast_calls: int
    plain_seconds: float
    fast_seconds: float
    identical: bool
    promised: bool = False
    output_law: str = ""
    entry_call: Tensor | None = None
    near_ties: int | None = None

    @property
    def columns_per_call(self) -> float:
        """Committed columns over target calls, the one that each call draws itself included."""
        return len(self.commit_call) / self.fast_calls

    @property
    def speed_up(self) -> float:
        """Plain seconds over accelerated seconds."""
        return self.plain_seconds / self.fast_seconds if self.fast_seconds > 0 else 0.0


def mel_picture(audio: np.ndarray | Tensor, sampling_rate: int, width: int, height: int) -> Image.Image:
    """The log mel spectrogram of a clip, [C, N] or [N]: time to the right, pitch upwards, -80 dB to 0 dB.

    Raises:
        ValueError: no samples, or values that are not finite.
    """
    wave = torch.as_tensor(audio).double()
    wave = wave.mean(0) if wave.ndim == 2 else wave
    if not wave.numel() or not wave.isfinite().all():
        raise ValueError(f"a clip of {wave.numel()} samples, or with nan or infinity; pass finite samples.")
    decibels = levels(wave, _WINDOW, sampling_rate)  # [bands, frames]
    share = (1 - decibels.clamp(_LEAST_DECIBELS, 0) / _LEAST_DECIBELS).flip(0).numpy()
    stops = np.linspace(0, 1, len(_COLOURS))
    colours = [np.interp(share, stops, channel) for channel in np.array(_COLOURS, float).T]
    picture = Image.fromarray(np.rint(np.stack(colours, -1)).astype(np.uint8))
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def call_map(row: AudioRow) -> tuple[str, str]:
    """What cost a model call, as SVG, and what it shows in words."""
    if row.entry_call is not None:
        said = "one colour: one call (a row is a codebook, coarsest on top)"
        return entries_svg(row.entry_call, said), said
    paid = int(paid_slots(row.commit_call).sum())
    said = f"{paid} columns paid, {len(row.commit_call) - paid} free"
    return runs_svg(row.commit_call, said), said


def write_music_page(
    rows: Sequence[AudioRow],
    path: str | Path,
    title: str = "Plain and accelerated music",
    facts: Mapping[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Write one self-contained page: players and pictures inline, its own style, no scripts.

    Args:
        rows: the comparisons, one section each.
        facts: name -> value, shown as a table.

    Raises:
        ValueError: no rows.
        FileExistsError: `path` exists, and `overwrite` is not set.
    """
    if not rows:
        raise ValueError("no rows to show; pass at least one AudioRow.")
    columns, calls = sum(len(row.commit_call) for row in rows), sum(row.fast_calls for row in rows)
    fast_seconds = sum(row.fast_seconds for row in rows)
    totals = {
        "columns_per_call": columns / calls,
        "plain_calls": sum(row.plain_calls for row in rows),
        "fast_calls": calls,
        "speed_up": sum(row.plain_seconds for row in rows) / fast_seconds if fast_seconds > 0 else 0.0,
        "identical": sum(row.identical for row in rows),
    }
    sections = []
    for row in rows:
        plain, fast = (audio_bytes(audio, row.sampling_rate) for audio in (row.plain_audio, row.fast_audio))
        drawn, said = call_map(row)
        seconds = row.fast_audio.shape[-1] / row.sampling_rate
        sections.append(
            {
                "row": row,
                "plain": None if row.identical else _url("audio/wav", plain),
                "fast": _url("audio/wav", fast),
                "mel": _url(
                    "image/png", png_bytes(mel_picture(row.fast_audio, row.sampling_rate, _WIDTH, 220))
                ),
                "map": drawn,
                "caption": said,
                "ticks": [f"{tick * seconds / 4:.3g} s" for tick in range(5)],
            }
        )
    page = render_page(
        "music.html.jinja",
        title=title,
        facts=dict(facts or {}),
        sections=sections,
        totals=totals,
        colours=RUN_COLOURS[0],
        filled_in=rows[0].entry_call is not None,
    )
    return write_atomically(path, page, overwrite=overwrite)


def _url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64," + base64.b64encode(content).decode()
