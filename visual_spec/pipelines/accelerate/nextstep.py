"""Speed up the head of a NextStep-1 or NextStep-1.1 that the user already has, and undo it.

    model = AutoModel.from_pretrained("stepfun-ai/NextStep-1.1", trust_remote_code=True)
    pipe = NextStepPipeline(tokenizer=tokenizer, model=model)  # of the public code, as ever
    visual_spec.accelerate(pipe)  # or the model
    pipe.generate_image(...)

A language model makes one condition for each token of a picture, and a head makes the token in 20 or more evaluations.
Only the head's `sample` is replaced; it takes the same arguments and draws the same noise in the same order. Three
fifths of the head's weights turn condition and time into modulations of its layers. These products run once a token,
for all its evaluations, and guidance rows share the first layer. On a GPU the evaluations of a token are recorded as
one CUDA graph. So tokens equal the public code's, up to rounding.

Nothing is drafted: `visual_spec.samplers.continuous` says what is exact on such heads. Classes are known by their
names, because their code comes with the weights. Read in the public code of NextStep-1 (`modeling_fm_head.py`); a test
holds numbers that it gave.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visual_spec.models.continuous.speech_heads import NextStepHead
from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.settings import AUTO
from visual_spec.pipelines.accelerate.adapter import Adapter, Thing, hang, refuse_sampler
from visual_spec.samplers.core.checks import wants_graph
from visual_spec.samplers.core.graph import RecordedFunction
from visual_spec.samplers.core.precision import low_precision_of, up_to_rounding
from visual_spec.samplers.core.trace import Stopwatch


@dataclass
class HeadTrace:
    """What the head cost since a model was accelerated.

    Attributes:
        model: class name of the model.
        tokens: made, a batch of them counting once.
        head_calls: evaluations of the head.
        seconds: wall time of them.
        low_precision: what the head rounds to where that is coarser than float32, such as "bfloat16"; else None.
    """

    model: str
    tokens: int = 0
    head_calls: int = 0
    seconds: float = 0.0
    low_precision: str | None = None

    def summary(self) -> str:
        """Return one line: tokens, evaluations, time, and what the tokens are."""
        return (
            f"{self.model}: {self.tokens} tokens in {self.head_calls} evaluations of the head, {self.seconds:.2f} s, "
            f"the tokens of its own code {up_to_rounding(self.low_precision)}"
        )


class NextStepAdapter(Adapter):
    """NextStep-1 and 1.1: the head's modulations once a token, the same tokens. `last_trace` is a `HeadTrace`."""

    takes = ("NextStep",)
    fast_sampler = None  # all that is done is exact

    def models(self, thing: object) -> list[Any]:
        model = thing if isinstance(thing, nn.Module) else getattr(thing, "model", None)
        head = getattr(model, "image_head", None)
        names = type(head).__name__, type(getattr(head, "net", None)).__name__
        return [model] if names == ("FlowMatchingHead", "SimpleMLPAdaLN") else []

    def accelerate(self, thing: Thing, sampler: object = None) -> Thing:
        """Replace the head's `sample`. Twice changes nothing.

        Raises:
            TypeError: a sampler (these models take none).
        """
        (model,) = self.models(thing)
        refuse_sampler(model, sampler, "its head makes one token after the other")
        self.restore(thing)
        trace = HeadTrace(type(model).__name__)
        head = model.image_head
        hang(head, sample=functools.update_wrapper(functools.partial(_Sample(head, trace)), head.sample))
        hang(model, last_trace=trace)
        return thing

    def parts(self, model: Any) -> tuple[object, ...]:
        return model.image_head, model

    def line(self, model: Any) -> str:
        return model.last_trace.summary() if model.last_trace.tokens else self.promised(model)

    def expects(self, model: Any) -> str:
        low = low_precision_of(model.image_head)
        return f"the head's modulations once a token, the same tokens {up_to_rounding(low)}"


class _Sample:
    """The `sample` of a head."""

    def __init__(self, head: Any, trace: HeadTrace) -> None:
        self.head, self.trace = head, trace
        self._recorded: dict[tuple[object, ...], RecordedFunction] = {}

    @torch.no_grad()
    def __call__(
        self,
        c: Tensor,
        cfg: float = 1.0,
        cfg2: float = 1.0,
        timesteps_shift: float = 1.0,
        num_sampling_steps: int = 20,
        last_step_size: float = 0.04,
        noise_repeat: int = 1,
    ) -> Tensor:
        """Tokens [N / n, D] of conditions [n N, C], for n groups of guidance."""
        groups = 1 + (cfg > 1) + (cfg2 > 1)
        rows = len(c) // groups
        if num_sampling_steps < 2 or rows % noise_repeat:
            raise ValueError(
                f"num_sampling_steps={num_sampling_steps}, noise_repeat={noise_repeat} for {rows} rows; pass 2 steps "
                "or more, and a noise_repeat that divides the rows."
            )
        watch = Stopwatch()
        with at_hand(self.head, leaves=False):
            device = next(self.head.parameters()).device
            c = c.to(device)
            times = torch.linspace(0, 1 - last_step_size, num_sampling_steps)
            times = times / (timesteps_shift - (timesteps_shift - 1) * times)
            net = NextStepHead(self.head.net)
            # The noise that a token starts from, and the noise of its steps.
            draws = [torch.randn(noise_repeat, self.head.input_dim, device=device) for _ in times]
            noise = torch.stack([draw.repeat(rows // noise_repeat, 1) for draw in draws])
            solve = functools.partial(_solve, net, times.tolist(), last_step_size, cfg, cfg2, groups)
            if wants_graph(AUTO, self.head):
                key = (num_sampling_steps, timesteps_shift, last_step_size, cfg, cfg2, c.dtype, device)
                solve = self._recorded.setdefault(key, RecordedFunction(self.head, solve))
            token = solve(noise, c, times.to(c))
        watch.lap("head", device)
        self.trace.tokens += 1
        self.trace.head_calls += num_sampling_steps
        self.trace.seconds += watch.read()[0]
        self.trace.low_precision = low_precision_of(self.head)
        return token


def _solve(
    net: NextStepHead,
    times: list[float],
    last: float,
    cfg: float,
    cfg2: float,
    groups: int,
    noise: Tensor,
    condition: Tensor,
    all_times: Tensor,
) -> Tensor:
    """A token [N, D] by Euler-Maruyama steps over the times, and one of size `last` without noise."""
    modulations = net.modulations(condition, net.embed(all_times))
    token = noise[0]

    def velocity(step: int) -> Tensor:
        parts = net.output(token.to(condition.dtype), modulations, step).float().chunk(groups)
        if groups == 1:
            return parts[0]
        if groups == 2:
            return parts[1] + cfg * (parts[0] - parts[1])
        return parts[2] + cfg2 * (parts[1] - parts[2]) + cfg * (parts[0] - parts[1])

    for step, (time, after) in enumerate(zip(times, times[1:], strict=False)):
        rest, flow = 1 - time, velocity(step)
        score = (time * flow - token) / (rest**2 + time * rest)
        spread = (2 * rest * (after - time)) ** 0.5
        token = token + (flow + rest * score) * (after - time) + spread * noise[step + 1]
    return (token + velocity(len(times) - 1) * last).to(condition.dtype)
