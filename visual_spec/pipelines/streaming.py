"""Samples that grow while they are decoded: outputs of a call as they would be if it ended after this target call."""

from __future__ import annotations

import contextvars
import copy
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from einops import repeat
from torch import Tensor

from visual_spec.pipelines.output import AudioPipelineOutput
from visual_spec.samplers.core.base import STOP
from visual_spec.samplers.core.state import WATCHER

if TYPE_CHECKING:
    from visual_spec.samplers.core.trace import SampleResult

Hear = Callable[[Callable[[], object]], str | None]  # hands an item on, see `stream_of`

GREY = 0.5  # of pixels in [0, 1]: places that are open


def stream_pictures(
    pipe: Any, every: int, args: tuple, kwargs: dict[str, Any], show: Callable[[SampleResult], object]
) -> Generator[Any]:
    """What `show` makes of a decode after every so many target calls, then the output of the pipeline."""

    def call(hear: Hear) -> object:
        calls = 0

        def watch(result: Callable[[], SampleResult]) -> str | None:
            nonlocal calls
            calls += 1
            # A copy: what the result holds goes on.
            return hear(lambda: copy.deepcopy(result()) if calls % every == 0 else None)

        WATCHER.set(watch)
        return pipe(*args, **kwargs)

    return stream_of(call, show)


def stream_waves(pipe: Any, args: tuple, kwargs: dict[str, Any], output_type: str) -> Generator[Any]:
    """Outputs of a pipeline of music with what is heard so far, stretch by stretch, then its own output."""
    heard: list[Tensor] = []

    def call(hear: Hear) -> object:
        def listen(pipe: Any, start: int, waves: Tensor) -> None:
            if hear(lambda: waves) is STOP:
                pipe._interrupt = True

        return pipe(*args, **kwargs, callback_on_audio=listen)

    def partial(waves: Tensor) -> AudioPipelineOutput:
        heard.append(waves)
        audios = torch.cat(heard, -1)
        unknown: Any = None  # codes and trace, until the end
        shown = audios.numpy() if output_type == "np" else audios
        return AudioPipelineOutput(shown, pipe.sampling_rate, unknown, unknown)

    return stream_of(call, partial)


def stream_of(call: Callable[[Hear], object], partial: Callable[[Any], object]) -> Generator[Any]:
    """Yield what `partial` makes of all that a call hands on, then what it returns.

    The call runs in a thread of its own, at most two items ahead, under the reader's autocast, gradient mode and
    device. It ends soon after the iterator is closed, or the program ends.

    Args:
        call: takes a function to hand items on, each as a function that makes it (None: nothing to show), which
            returns `STOP` where nobody reads them any more.
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=1)
    closed, surroundings = threading.Event(), _surroundings()

    def over() -> bool:
        # A program that ends waits for its threads, after this one has ended.
        return closed.is_set() or not threading.main_thread().is_alive()

    def put(kind: str, item: object) -> None:
        while not over():
            try:
                return ready.put((kind, item), timeout=0.1)
            except queue.Full:
                continue

    def hear(make: Callable[[], object]) -> str | None:
        if not over() and (item := make()) is not None:
            put("partial", item)
        return STOP if over() else None

    def work() -> None:
        try:
            with surroundings():
                put("whole", call(hear))
        except BaseException as error:  # raised where the iterator is read
            put("error", error)

    worker = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="visual-spec-stream")
    worker.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "error":
                raise item
            if kind == "whole":
                yield item
                return
            with torch.no_grad():
                made = partial(item)
            yield made
    finally:
        closed.set()
        worker.join()


def _surroundings() -> Callable[[], ExitStack]:
    """What PyTorch keeps for each thread, as it is here: a function that enters it in another thread."""
    kinds = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    cached, device = torch.is_autocast_cache_enabled(), torch.get_default_device()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def enter() -> ExitStack:
        held = ExitStack()
        if stream is not None:
            held.enter_context(torch.cuda.stream(stream))  # and its device
        if device != torch.device("cpu"):
            held.enter_context(device)
        held.enter_context(torch.set_grad_enabled(grad))
        if inference:
            held.enter_context(torch.inference_mode())
        for kind, dtype in casts:
            held.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        return held

    return enter


def with_grey(pixels: Tensor, is_open: Tensor, patch: int) -> Tensor:
    """Pixels [B, 3, H, W] or [B, T, 3, H, W] in [0, 1], grey at the open tokens, bool [B, h * w] or [B, T * h * w]."""
    clips = pixels if pixels.dim() == 5 else pixels[:, None]
    rows, columns = clips.shape[-2] // patch, clips.shape[-1] // patch
    places = is_open.to(pixels.device).reshape(len(clips), -1, 1, rows, columns)
    squares = repeat(places, "b t c h w -> b t c (h p) (w q)", p=patch, q=patch)
    return clips.masked_fill(squares, GREY).reshape(pixels.shape)
