"""Clips decoded window by window and heard meanwhile: committed columns become waves, in equal stretches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import EncodecModel

from visual_spec.models.columns.encodec import StreamingDecoder
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.columns.musicgen_modules import MusicCondition
from visual_spec.pipelines.steps import DecodeProgress
from visual_spec.pipelines.traces import joined_traces
from visual_spec.samplers.core.trace import DecodeTrace


class WaveStream:
    """Codes in, waves out, stretch by stretch.

    Codes are decoded in stretches of one length, whatever the portions they come in. So the waves are the same, bit by
    bit, whether a clip is streamed or decoded at its end.

    Args:
        codec: an `EncodecModel`.
        channels: 1 or 2.
        total: frames of the clip.
        stretch: frames that are decoded at once.
        listener: called as (start, waves), where `start` counts samples and `waves` is float32 [B, C, m] on the CPU,
            for every stretch. They follow each other without gaps.
    """

    def __init__(
        self,
        codec: EncodecModel,
        channels: int,
        total: int,
        stretch: int,
        listener: Callable[[int, Tensor], object] | None = None,
    ) -> None:
        self.decoder = StreamingDecoder(codec, channels)
        self.total, self.stretch, self.listener = total, stretch, listener
        self.received = self.decoded = 0  # frames
        self.heard = 0  # samples
        self._waiting: Tensor | None = None
        self._waves: list[Tensor] = []

    def __call__(self, codes: Tensor) -> None:
        """Go on with codes, long [B, K, n]; n may be 0."""
        self.received += codes.shape[-1]
        waiting = codes if self._waiting is None else torch.cat([self._waiting, codes], -1)
        while self.decoded < self.total:
            count = min(self.stretch, self.total - self.decoded)
            if waiting.shape[-1] < count:
                break
            self.decoded += count
            self._hear(self.decoder(waiting[..., :count], last=self.decoded == self.total))
            waiting = waiting[..., count:]
        self._waiting = waiting

    def end(self) -> None:
        """No codes follow: the clip ends with those received."""
        assert self._waiting is not None
        self.total = self.received
        if self.decoded < self.total:
            self(self._waiting[..., :0])
        elif self.decoded and not self.decoder.ended:
            self._hear(self.decoder(self._waiting[..., :0], last=True))

    def _hear(self, waves: Tensor) -> None:
        if waves.shape[-1]:
            waves = waves.float().cpu()
            self._waves.append(waves)
            if self.listener is not None:
                self.listener(self.heard, waves)
            self.heard += waves.shape[-1]

    def waves(self) -> Tensor:
        """All that was heard, [B, C, N]."""
        if not self._waves:
            assert self._waiting is not None
            return torch.zeros(len(self._waiting), self.decoder.channels, 0)
        return torch.cat(self._waves, -1)


class WatchedModel(MusicgenColumnModel):
    """A model, as it was made, that remembers what it is fed.

    That tells which columns are committed while a sampler is still at work: a step is fed a last time with the column
    that is committed, or before it, and of the first `length` steps all but the newest have been.
    """

    def __init__(self, model: MusicgenColumnModel) -> None:
        vars(self).update(vars(model))
        self.fed = torch.zeros(0)

    def prefill(self, condition: Any, *, batch_size: int, guided: bool, window: int) -> Any:
        state = super().prefill(condition, batch_size=batch_size, guided=guided, window=window)
        shape = (batch_size, self.grid.width + window, self.grid.codebooks)
        self.fed = torch.zeros(shape, dtype=torch.long, device=state.logits.device)
        return state

    def __call__(self, state: Any, tokens: Tensor, steps: Tensor) -> Tensor:
        self.fed.scatter_(1, steps[..., None].expand_as(tokens), tokens)
        return super().__call__(state, tokens, steps)

    def codes_fed(self, condition: MusicCondition) -> Tensor:
        """Codes [B, K, T]; codes of frames that are not known yet mean nothing."""
        return self.codes(self.fed[:, : self.grid.width], condition)


def plan_windows(
    length: float,
    stride: float | None,
    given_frames: int = 0,
    *,
    limit: float,
    frame_rate: float,
    span: int = 1,
) -> list[tuple[int, int]]:
    """The windows that a clip is decoded in: frames that are kept from before, and frames that are new.

    Args:
        length: of the clip in seconds, including the clip to go on from.
        stride: seconds that the window moves by, of a clip longer than `limit`.
        given_frames: of the clip to go on from.
        limit: seconds of a window, the length that the model was trained on.
        frame_rate: frames per second.
        span: frames that are decoded together. Every window holds whole spans, and the rest of the length is dropped
            before the windows are planned: of 500 frames in spans of 3, 498 are decoded, as in audiocraft.

    Raises:
        ValueError: a length of zero, or beyond the limit without a stride; a stride out of its range; a clip to go on
            from that fills the length.
    """
    longest = round(limit * frame_rate) // span * span
    if not (math.isfinite(length) and round(length * frame_rate) >= span):
        least = "one frame" if span == 1 else f"one span of {span} frames,"
        raise ValueError(
            f"audio_length_in_s={length}; pass at least {least} of {span / frame_rate:g} s, and at most {limit:g} s, "
            "or more of them with extend_stride_in_s."
        )
    total = round(length * frame_rate) // span * span
    if given_frames >= total:
        raise ValueError(
            f"audio of {given_frames / frame_rate:g} s leaves nothing to play of audio_length_in_s={length:g}, which "
            "counts it; pass a greater length, or a shorter clip."
        )
    keep = longest
    if stride is not None:
        moved = round(stride * frame_rate) if math.isfinite(stride) else 0
        if not 1 <= moved < longest:
            raise ValueError(
                f"extend_stride_in_s={stride}; pass at least {1 / frame_rate:g} and less than {limit:g}, the length of "
                "the window: the rest of it is what the music goes on from."
            )
        keep = longest - moved
    elif total > longest:
        raise ValueError(
            f"audio_length_in_s={length:g}, but this model was trained on clips of {limit:g} s; pass at most that, or "
            f"extend_stride_in_s (such as {0.6 * limit:.3g}) to go on by a window of {limit:g} s that moves by so many "
            "seconds."
        )
    if total <= longest:
        return [(given_frames, total - given_frames)]
    windows, place = [], given_frames
    while place < total:
        kept = min(place, keep)
        new = min(longest - kept, total - place)
        kept += -(kept + new) % span
        windows.append((kept, new))
        place += new
    return windows


class ClipWindow(NamedTuple):
    """What decodes a window of a clip.

    Args:
        kept: frames of the clip so far that the model goes on from.
        model: over the frames that are kept and those that are new.
        parts: what the sampler takes beside: a drafter, a codebook.
    """

    kept: int
    model: MusicgenColumnModel | MagnetModel
    parts: dict[str, Any]


def decode_windows(
    sampler: Any,
    condition: MusicCondition,
    codes: Tensor,
    windows: Sequence[ClipWindow],
    *,
    progress_bar: Callable[..., Any],
    stream: WaveStream | None,
    listener: Callable[[int, Tensor], object],
    **settings: Any,
) -> tuple[Tensor, DecodeTrace]:
    """Decode a clip window by window: what is kept of the codes so far is the prompt of the next ones.

    Args:
        sampler: of columns, or of masked models.
        codes: long [B, K, P] to go on from; P may be 0.
        progress_bar: makes a tqdm bar of a total.
        stream: gets the codes after every window; if it has a listener, it gets columns as soon as they are committed.
        listener: called as (call_index, lengths [B]) after every target call, both over all windows; returns `STOP` to
            end the decode.
        settings: law, generator and output_logprobs, as for `sampler.__call__`.

    Returns:
        Codes [B, K, T], which begin with `codes`, and one trace of all windows. If the listener ends the decode, T is
        the number of leading frames that are known of every clip.
    """
    batch_size, traces = len(condition.features), []
    total = sum(window.model.grid.width for window in windows)
    if stream is not None:
        stream(codes)
    with progress_bar(total=batch_size * total) as bar:
        progress = DecodeProgress(bar, total, listener, unit="columns")
        for kept, model, parts in windows:
            before = codes.shape[-1] - kept  # frames that are out of sight
            known = replace(condition, codes=codes[..., before:])
            watched = None
            if isinstance(model, MagnetModel):
                call = (model, condition)
                parts = parts | {"known_tokens": model.known_tokens(codes[..., before:])}
            else:
                watched = None if stream is None or stream.listener is None else WatchedModel(model)
                call = (watched or model, known)
            callback = _advance(progress, traces, stream, watched, known, before)
            result = sampler(*call, batch_size=batch_size, callback=callback, **parts, **settings)
            trace = result.trace
            decoded = model.codes(result.tokens, known)
            if trace.stopped:
                known_steps = int((trace.commit_call >= 0).all(0).long().cumprod(0).sum())
                decoded = decoded[..., : frames_known(model, known_steps)]
            codes = torch.cat([codes, decoded[..., kept:]], -1)
            if stream is not None:
                stream(codes[..., stream.received :])
            if isinstance(model, MagnetModel):  # its trace also counts the frames that were kept
                names = ("commit_call", "entry_call", "logprobs", "model_logprobs")
                by_frame = {name: getattr(trace, name) for name in names}
                new = {name: part[:, kept:] for name, part in by_frame.items() if part is not None}
                trace = replace(trace, **new)
            traces.append(trace)
            if trace.stopped:
                if stream is not None:
                    stream.end()
                break
        progress.finish()
    return codes, joined_traces(traces)


def frames_known(model: MusicgenColumnModel | MagnetModel, steps: int) -> int:
    """Leading frames, the prompt's included, that are known once the first `steps` steps are."""
    if isinstance(model, MagnetModel):
        return steps
    # Frames are heard in their order: one waits for all before it.
    complete = model.pattern.complete_after(model.num_frames).cummax(0).values  # [T], in steps
    return int((complete - model.first_step <= steps).sum())


def _advance(
    progress: DecodeProgress,
    earlier: list[DecodeTrace],
    stream: WaveStream | None,
    watched: WatchedModel | None,
    known: MusicCondition,
    before: int,
) -> Callable[[int, Tensor], object]:
    """The sampler's callback in a window after `earlier` ones: shows progress, and streams what is committed.

    Args:
        watched, known: the model of the window and its condition, where there is something to stream.
        before: the window's first frame.
    """
    calls = sum(int(trace.target_calls.max()) for trace in earlier)
    columns = sum(trace.commit_call.shape[1] for trace in earlier)

    def advance(call: int, lengths: Tensor) -> object:
        answer = progress(calls + call, columns + lengths)
        if stream is not None and watched is not None:
            heard = before + frames_known(watched, int(lengths.min()) - 1)  # the newest step may not be fed
            if heard - stream.received >= stream.stretch:
                stream(watched.codes_fed(known)[..., stream.received - before : heard - before])
        return answer

    return advance
