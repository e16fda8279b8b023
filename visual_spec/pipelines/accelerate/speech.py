"""Speed up a speech model of transformers that the user already has, and undo it.

    model = VibeVoiceForConditionalGeneration.from_pretrained(...)
    visual_spec.accelerate(model)
    audio = model.generate(**processor(...), max_new_tokens=400)

As `visual_spec.pipelines.accelerate.images` for images: `accelerate` hangs functions on the object and touches
nothing else. `generate` stays the model's own, with every setting it takes; the functions that it calls are replaced.
For the same noise the latents are the same, up to rounding: products of more rows round differently.

A guided `generate` of VibeVoice reads all weights of the language model three times a latent: for the prompt with its
audio, for the audio alone, and for the text guidance that `generate` puts on the token. It reads the head's ten
times. Here:

* One call of the language model serves all three texts (`JoinedCache`). The text of audio alone moves on only in steps
  that yield audio, so its part of other calls is not kept. It starts anew with every piece of audio; if another sample
  of the batch speaks in that very step, the text of audio alone is called by itself once more. Without guidance
  (scale 1) the prompt's text alone is called: the others change nothing.
* The head's modulations of all steps are one product before its loop, and guidance rows share what they have in common.
* The solver is read off the scheduler once (`read_solver`). On a GPU the whole loop is recorded as a CUDA graph.

Two things stay as they are. Calls of the language model: where the cache is not dynamic (static, quantised,
offloaded), is not used or has sliding layers, where attention is neither "sdpa" nor "eager", and where a text is longer
than a rotary embedding that follows the length of a call ("dynamic", "longrope") allows. Steps of the solver:
where the scheduler is of another class than `DPMSolverMultistepScheduler`, draws noise in its steps, or clips by
thresholding. The head is split for these schedulers, too.

PocketTTS makes one call of the language model a latent as it is. Its head is split, and its loop recorded.

No speculation is offered, because both solvers are deterministic: the only randomness of a latent is the noise it
starts from, so no later draw is left by which a draft could be accepted.

Checked with transformers 5.20 (VibeVoice), 5.22 to 5.24.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from visual_spec.models.continuous.speech_heads import PocketTTSHead, SpeechHead
from visual_spec.models.core.offload import at_hand
from visual_spec.pipelines.accelerate.adapter import Adapter, Thing, is_accelerated, refuse_sampler, unwrapped
from visual_spec.pipelines.accelerate.speech_model import FORWARD, GENERATE, SpeechModel, SpeechRun
from visual_spec.pipelines.accelerate.vibevoice import VibeVoice
from visual_spec.samplers.core.precision import low_precision_of, up_to_rounding

_FLOW = "sample_latent"


class PocketTTS(SpeechModel):
    """PocketTTS with a split head and a recorded loop."""

    replaces = (GENERATE, FORWARD, _FLOW)

    def begin(self) -> None:
        self.embedded: dict[tuple[object, ...], Tensor] = {}

    def count_latents(self, run: SpeechRun, result: Any) -> Tensor:
        mask = getattr(result, "audio_latents_mask", None)
        return torch.tensor([len(one) for one in result]) if mask is None else mask.sum(-1).cpu()

    def sample_latent(self, condition: Tensor, noise: Tensor, num_flow_steps: int) -> Tensor:
        if self.run is None:
            return self.plain[_FLOW](condition, noise, num_flow_steps)
        self.run.watch.lap("rest", condition.device)
        module, device = self.model.flow_head, noise.device
        # Without times, noise becomes a latent at once.
        steps = num_flow_steps if len(module.timestep_embeddings) else 0
        with at_hand(module, leaves=False):
            there = next(module.parameters()).device
            head, condition, noise = PocketTTSHead(module), condition.to(there), noise.to(there)
            key = (steps, noise.dtype, there)
            if key not in self.embedded:
                times = [(step / steps, (step + 1) / steps) for step in range(steps)] or [()]
                self.embedded[key] = head.embed(torch.tensor(times, dtype=noise.dtype, device=there))
            latents = self.solve(
                module, steps, functools.partial(_flow, head, steps), noise, condition, self.embedded[key]
            )
        self.run.watch.lap("head", there)
        self.run.head_calls += max(1, steps)
        return latents.to(device)


def _flow(head: SpeechHead, steps: int, noise: Tensor, condition: Tensor, embedded: Tensor) -> Tensor:
    """Latents [N, D] by Euler steps; by one call where there are none."""
    modulations = head.modulations(condition, embedded)
    if not steps:
        return head.output(noise, modulations, 0)
    for step in range(steps):
        noise = noise + head.output(noise, modulations, step) / steps
    return noise


MODELS: dict[str, type[SpeechModel]] = {
    "VibeVoiceForConditionalGeneration": VibeVoice,
    "PocketTTSForConditionalGeneration": PocketTTS,
}


class SpeechAdapter(Adapter):
    """VibeVoice and PocketTTS of transformers: fewer calls for the same latents.

    The model's `generate` gives `last_trace`, a `SpeechTrace`.
    """

    takes = tuple(MODELS)
    fast_sampler = None  # all that is done is exact
    kin = ("VibeVoice*", "PocketTTS*")

    def models(self, thing: object) -> list[Any]:
        model = unwrapped(thing)
        return [model] if _kind_of(model) is not None else []

    def accelerate(self, thing: Thing, sampler: object = None) -> Thing:
        """Replace what `generate` calls. Twice changes nothing.

        Raises:
            TypeError: another model, a sampler (these models need none), or a release of transformers whose `generate`
                has other parts.
        """
        model = unwrapped(thing)
        kind = _kind_of(model)
        if kind is None:
            raise TypeError(f"cannot accelerate a {type(model).__name__}; pass a {' or a '.join(MODELS)}.")
        refuse_sampler(model, sampler, "its solver draws no noise by which a draft could be accepted")
        missing = [name for name in kind.replaces if not hasattr(model, name)]
        if missing:
            import transformers

            raise TypeError(
                f"{type(model).__name__} of transformers {transformers.__version__} has no {', '.join(missing)}; use a "
                "release from 5.20 to 5.24."
            )
        if not is_accelerated(model):
            kind(model).hang()
        return thing

    def expects(self, model: object) -> str:
        return f"the same latents in fewer calls, {up_to_rounding(low_precision_of(model))}"


def _kind_of(model: object) -> type[SpeechModel] | None:
    names = {parent.__name__ for parent in type(model).__mro__}
    return next((kind for name, kind in MODELS.items() if name in names), None)
