"""What accelerated speech models share: the functions hung on them, and the record of a `generate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.core.settings import AUTO
from visual_spec.pipelines.accelerate.adapter import hang, tell
from visual_spec.samplers.core.checks import wants_graph
from visual_spec.samplers.core.graph import RecordedFunction
from visual_spec.samplers.core.precision import low_precision_of, up_to_rounding
from visual_spec.samplers.core.trace import Stopwatch

GENERATE, FORWARD = "generate", "forward"


@dataclass
class SpeechTrace:
    """What a `generate` of an accelerated model cost.

    Attributes:
        model: class name of the model.
        latents: long [B], how many each sample has.
        language_calls: calls of the language model, prefill included; calls of a compiled model are not counted.
        head_calls: evaluations of the head, each of all rows that speak.
        seconds: wall time of `generate`.
        phase_seconds: seconds of "language", "head", and "rest": the codec, and `generate` itself.
        low_precision: what the model rounds to where that is coarser than float32, such as "bfloat16"; else None.
    """

    model: str
    latents: Tensor
    language_calls: int
    head_calls: int
    seconds: float
    phase_seconds: dict[str, float]
    low_precision: str | None = None

    def summary(self) -> str:
        """Return one line: latents, calls, time, and what the latents are."""
        return (
            f"{self.model}: {int(self.latents.sum())} latents in {len(self.latents)} samples, {self.language_calls} "
            f"calls of the language model, {self.head_calls} of the head, {self.seconds:.2f} s, the latents of its own "
            f"generate {up_to_rounding(self.low_precision)}"
        )


@dataclass
class SpeechRun:
    """What one `generate` has done so far."""

    graphs: bool
    watch: Stopwatch = field(default_factory=Stopwatch)
    latents: Tensor | None = None
    language_calls: int = 0
    head_calls: int = 0


class SpeechModel:
    """An accelerated model: the functions hung on it. Outside of `generate` they do what the model's own do."""

    replaces: Sequence[str] = (GENERATE, FORWARD)

    def __init__(self, model: Any) -> None:
        self.model = model
        self.plain = {name: getattr(model, name) for name in self.replaces}
        self.run: SpeechRun | None = None
        self.loops: dict[object, RecordedFunction] = {}

    def hang(self) -> None:
        """Replace the model's functions. `generate` reads the signatures of some, so they stay what they were."""
        functions = {
            name: functools.update_wrapper(functools.partial(getattr(self, name)), plain)
            for name, plain in self.plain.items()
        }
        hang(self.model, **functions, last_trace=None)

    def generate(self, *args: object, **kwargs: object) -> Any:
        if self.run is not None:  # one that `generate` calls itself
            return self.plain[GENERATE](*args, **kwargs)
        self.run = run = SpeechRun(wants_graph(AUTO, self.model))
        self.begin()
        result = None
        try:
            result = self.plain[GENERATE](*args, **kwargs)
        finally:
            self.run = None
            self.end(result)
        run.watch.lap("rest", self.model.device)
        seconds, phases = run.watch.read()
        trace = SpeechTrace(
            type(self.model).__name__,
            self.count_latents(run, result),
            run.language_calls,
            run.head_calls,
            seconds,
            phases,
            low_precision_of(self.model),
        )
        tell(self.model, True, last_trace=trace)
        return result

    def forward(self, *args: Any, **kwargs: object) -> Any:
        compiled = torch.compiler.is_compiling()
        return (self.plain[FORWARD] if compiled or self.run is None else self.call)(*args, **kwargs)

    def call(self, *args: object, **kwargs: object) -> Any:
        """The model's own forward, counted and timed."""
        run = self.run
        assert run is not None
        run.watch.lap("rest", self.model.device)
        outputs = self.plain[FORWARD](*args, **kwargs)
        run.watch.lap("language", self.model.device)
        run.language_calls += 1
        return outputs

    def begin(self) -> None:
        """A `generate` begins."""

    def end(self, result: object) -> None:
        """It ended with a result, or failed with None."""

    def count_latents(self, run: SpeechRun, result: Any) -> Tensor:
        """Latents of each sample, long [B] on the CPU."""
        raise NotImplementedError

    def solve(self, head: nn.Module, key: object, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """A latent: the function of the inputs, recorded where that is possible.

        Args:
            head: the module whose weights the function reads.
            key: what the function depends on beside these and the inputs.
        """
        assert self.run is not None
        if not self.run.graphs:
            return function(*inputs)
        if key not in self.loops:
            self.loops[key] = RecordedFunction(head, function)
        return self.loops[key](*inputs)
