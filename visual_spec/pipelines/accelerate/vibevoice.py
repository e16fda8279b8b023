"""VibeVoice of transformers with one call of the language model a latent; see `speech` for the whole.

Replaced are the functions that its `generate` calls. Each gives what the model's own would give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visual_spec.models.continuous.dpm_solver import LinearSolver, read_solver
from visual_spec.models.continuous.joined_cache import JoinedCache, joined_mask
from visual_spec.models.continuous.speech_heads import SpeechHead, VibeVoiceHead, guided
from visual_spec.models.core.offload import at_hand
from visual_spec.models.core.transformers_cache import CACHE
from visual_spec.models.next_token.length_limits import length_limits
from visual_spec.pipelines.accelerate.speech_model import FORWARD, GENERATE, SpeechModel, SpeechRun

if TYPE_CHECKING:
    from transformers import Cache, GenerationConfig

_PREPARE, _RESTART = "_prepare_negative_generation", "_reset_negative_cache_for_audio_start"
_STEP, _LATENT = "_step_negative_branch", "_sample_audio_latent"
_ATTENTION = ("eager", "sdpa")  # that take the mask of rows of different lengths
_POSITIVE, _NEGATIVE, _GUIDING = 0, 1, 2  # where the texts stand in a joint call


@dataclass
class _Text:
    """One of the texts of a joint call: what it is called with."""

    cache: Any
    mask: Any
    given_positions: Tensor | None
    embeds: Tensor

    ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE)

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    @property
    def joinable(self) -> bool:
        """One token more in a cache that can be joined, and a mask and positions of one row each."""
        return (
            JoinedCache.joinable(self.cache)
            and self.embeds.ndim == 3
            and self.embeds.shape[1] == 1
            and isinstance(self.mask, Tensor)
            and self.mask.shape == (len(self.embeds), self.length + 1)
            and (self.given_positions is None or self.given_positions.shape == (len(self.embeds), 1))
        )

    @property
    def positions(self) -> Tensor:
        if self.given_positions is not None:
            return self.given_positions
        return torch.full_like(self.mask[:, :1], self.length)  # as the language model counts


class VibeVoice(SpeechModel):
    """An accelerated `VibeVoiceForConditionalGeneration`.

    A guided `generate` has three texts. The positive one is the prompt with its tokens and audio. The negative one
    knows only the audio. The guiding one knows only the tokens: a logits processor that `generate` adds to every guided
    generation calls the model with it.
    """

    replaces = (GENERATE, FORWARD, _PREPARE, _RESTART, _STEP, _LATENT)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.solvers: dict[tuple[type, str, int], LinearSolver | None] = {}
        # Rotary embeddings that follow the longest text of a call: beyond this each text needs a call of its own.
        decoder = model.model.language_model
        self.longest = min((most for most, _ in length_limits(decoder, decoder)), default=None)

    def begin(self) -> None:
        self.scale = 1.0
        self.negative: tuple[Tensor, dict[str, Any]] | None = None  # ids and arguments of its next call
        self.guiding: tuple[Cache, Tensor] | None = None  # its cache and mask
        self.joined: JoinedCache | None = None
        # Of the last joint call: what the negative and the guiding text would say, if they are asked.
        self.negative_ahead: Any = None
        self.guiding_ahead: Any = None
        self.restarted: Tensor | None = None
        self.embedded: dict[tuple[object, ...], Tensor] = {}

    def end(self, result: object) -> None:
        if self.joined is not None and getattr(result, CACHE, None) is not None:
            self.joined.release()
        self.begin()

    def count_latents(self, run: SpeechRun, result: Any) -> Tensor:
        samples = len(getattr(result, "audio", result))
        return torch.zeros(samples, dtype=torch.long) if run.latents is None else run.latents.cpu()

    # -- the language model --------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: object) -> Any:
        if self.run is None or self.negative is None or torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        if len(args) == 1 and set(kwargs) == {"attention_mask", "use_cache", CACHE}:
            return self._guide(args[0], **kwargs)
        texts = [] if args else self._texts(kwargs)
        if len(texts) < 2:
            return super().forward(*args, **kwargs)
        return self._joint_call(texts, kwargs)

    def _guide(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """The call of the logits processor: from the last joint call, or one that shows where its text stands."""
        ahead, self.guiding_ahead = self.guiding_ahead, None
        known = self.guiding is not None and kwargs[CACHE] is self.guiding[0]
        if ahead is None or not known:
            ahead = self.call(input_ids, **kwargs)
        else:
            assert self.joined is not None
            self.joined.keep(_GUIDING)
        self.guiding = (ahead.get(CACHE), kwargs["attention_mask"])
        return ahead

    def _texts(self, kwargs: dict[str, Any]) -> list[_Text]:
        """The texts that a call of the positive one can take along, itself first; none if it is no such call."""
        embeds, cache = kwargs.get("inputs_embeds"), kwargs.get(CACHE)
        assert self.negative is not None
        ids, negative = self.negative
        if embeds is None or self.scale == 1 or cache is negative.get(CACHE):
            return []
        self.negative_ahead = self.guiding_ahead = None
        texts = [_Text(cache, kwargs.get("attention_mask"), kwargs.get("position_ids"), embeds)]
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **negative)
        texts.append(
            _Text(inputs.get(CACHE), inputs.get("attention_mask"), inputs.get("position_ids"), embeds)
        )
        if self.guiding is not None and kwargs.get("input_ids") is not None:
            guide, mask = self.guiding
            tokens = self.model.get_input_embeddings()(kwargs["input_ids"])
            texts.append(_Text(guide, torch.cat([mask, torch.ones_like(mask[:, :1])], 1), None, tokens))
        rest = {name: value for name, value in kwargs.items() if name not in _Text.ARGUMENTS}
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation
        fits = (
            kwargs.get("use_cache", True)
            and attention in _ATTENTION
            and not any(isinstance(value, Tensor) for value in rest.values())
            and all(text.joinable for text in texts)
            and texts[_POSITIVE].length > 0
            and (self.longest is None or max(text.length for text in texts) < self.longest)
        )
        return texts if fits else []

    def _joint_call(self, texts: list[_Text], kwargs: dict[str, object]) -> Any:
        """One call for all texts. Returns what the positive one's would; keeps what the others' would."""
        caches = [text.cache for text in texts]
        if self.joined is None or [*map(id, self.joined.caches)] != [*map(id, caches)]:
            if self.joined is not None:
                self.joined.release()
            self.joined = JoinedCache(caches)
        size = self.joined.begin()
        batch = len(texts[_POSITIVE].embeds)
        outputs = self.call(
            **kwargs
            | {
                "input_ids": None,
                "inputs_embeds": torch.cat([text.embeds for text in texts]),
                "attention_mask": joined_mask([text.mask for text in texts], size),
                "position_ids": torch.cat([text.positions for text in texts]),
                CACHE: self.joined,
            }
        )
        parts = [
            _rows_of(outputs, slice(number * batch, (number + 1) * batch), cache)
            for number, cache in enumerate(caches)
        ]
        self.joined.keep(_POSITIVE)
        self.negative_ahead = parts[_NEGATIVE]
        self.guiding_ahead = parts[_GUIDING] if len(parts) > _GUIDING else None
        return parts[_POSITIVE]

    # -- the negative text ---------------------------------------------------------------------------------------------

    def _prepare_negative_generation(
        self, batch_size: int, generation_config: GenerationConfig, *args: object, **kwargs: object
    ) -> Any:
        self.negative = self.plain[_PREPARE](batch_size, generation_config, *args, **kwargs)
        self.scale = generation_config.guidance_scale
        return self.negative

    def _reset_negative_cache_for_audio_start(
        self,
        diffusion_start_mask: Tensor,
        negative_input_ids: Tensor,
        negative_model_kwargs: dict[str, object],
    ) -> None:
        self.plain[_RESTART](diffusion_start_mask, negative_input_ids, negative_model_kwargs)
        self.restarted = diffusion_start_mask

    def _step_negative_branch(
        self,
        diffusion_mask: Tensor,
        next_tokens: Tensor,
        inputs_embeds: Tensor | None,
        negative_input_ids: Tensor,
        negative_model_kwargs: dict[str, object],
        negative_forward: Callable[..., object],
    ) -> Any:
        given = (diffusion_mask, next_tokens, inputs_embeds, negative_input_ids, negative_model_kwargs)
        if self.run is None:
            return self.plain[_STEP](*given, negative_forward)
        counts = diffusion_mask.long()
        self.run.latents = counts if self.run.latents is None else self.run.latents + counts
        if self.scale == 1:
            return None, negative_input_ids, negative_model_kwargs
        ahead, self.negative_ahead = self.negative_ahead, None
        # A text that starts anew in this step was called before that was known. It cannot be the only one of a batch:
        # another one speaks.
        several = len(diffusion_mask) > 1 and self.restarted is not None
        if ahead is None or (several and bool(self.restarted.any())):  # pyright: ignore[reportOptionalMemberAccess]
            answer = self.plain[_STEP](*given, negative_forward)
        else:
            assert self.joined is not None
            self.joined.keep(_NEGATIVE)
            condition = ahead.last_hidden_state[diffusion_mask, -1, :]
            following = self.model._update_model_kwargs_for_generation(
                ahead, negative_model_kwargs, is_encoder_decoder=False
            )
            answer = condition, torch.cat([negative_input_ids, next_tokens[:, None]], -1), following
        self.negative = answer[1:]
        return answer

    # -- the head ------------------------------------------------------------------------------------------------------

    def _sample_audio_latent(
        self,
        positive_condition: Tensor,
        negative_condition: Tensor | None,
        noise_scheduler: Any,
        num_diffusion_steps: int,
        guidance_scale: float,
    ) -> Tensor:
        if self.run is None:
            return self.plain[_LATENT](
                positive_condition, negative_condition, noise_scheduler, num_diffusion_steps, guidance_scale
            )
        self.run.watch.lap("rest", positive_condition.device)
        module, rows = self.model.model.diffusion_head, len(positive_condition)
        condition = positive_condition
        if guidance_scale != 1:
            assert negative_condition is not None
            condition = torch.cat([positive_condition, negative_condition])
        with at_hand(module, leaves=False):
            condition = condition.to(next(module.parameters()).device)
            # As many numbers as `generate` draws, of which it uses the first half.
            noise = torch.randn(2 * rows, self.model.config.audio_config.hidden_size).to(condition)
            head, scale = VibeVoiceHead(module), guidance_scale
            solver = self._solver(noise_scheduler, num_diffusion_steps)
            if solver is None:
                latents = _own_steps(head, noise_scheduler, num_diffusion_steps, noise, condition, scale)
            else:
                latents = self.solve(
                    module,
                    (solver, scale),
                    functools.partial(_solve, head, solver, scale),
                    noise[:rows],
                    condition,
                    self._embedded(head, solver, condition),
                )
        self.run.watch.lap("head", condition.device)
        self.run.head_calls += num_diffusion_steps
        return latents.unsqueeze(1)

    def _solver(self, scheduler: object, steps: int) -> LinearSolver | None:
        config = repr(sorted(getattr(scheduler, "config", {}).items()))
        key = (type(scheduler), config, steps)
        if key not in self.solvers:
            self.solvers[key] = read_solver(scheduler, steps)
        return self.solvers[key]

    def _embedded(self, head: SpeechHead, solver: LinearSolver, like: Tensor) -> Tensor:
        """The embedded times, once a `generate`."""
        key = (solver, like.dtype, like.device)
        if key not in self.embedded:
            self.embedded[key] = head.embed(torch.tensor(solver.times, dtype=like.dtype, device=like.device))
        return self.embedded[key]


def _rows_of(outputs: Any, rows: slice, cache: Any) -> Any:
    """Rows of what the language model returned, with the cache of their text."""

    def cut(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) else tuple(cut(one) for one in value)

    parts = {name: cut(value) for name, value in outputs.items() if name != CACHE}
    return type(outputs)(**parts, **{CACHE: cache})


def _solve(
    head: SpeechHead, solver: LinearSolver, scale: float, noise: Tensor, condition: Tensor, embedded: Tensor
) -> Tensor:
    """Latents [N, D] from noise [N, D]; conditions [N, C], and after them the unconditional ones if guided."""
    modulations = head.modulations(condition, embedded)
    return solver.solve(noise, lambda step, latents: guided(head.output(latents, modulations, step), scale))


def _own_steps(
    head: SpeechHead, scheduler: Any, steps: int, noise: Tensor, condition: Tensor, scale: float
) -> Tensor:
    """As `_solve`, by the scheduler's own steps, from noise [2 N, D]: where they draw, they draw as in `generate`."""
    scheduler.set_timesteps(num_inference_steps=steps)
    times = torch.stack([time.to(condition) for time in scheduler.timesteps])
    modulations = head.modulations(condition, head.embed(times))
    rows = len(noise) // 2
    for step, time in enumerate(scheduler.timesteps):
        output = guided(head.output(noise[:rows], modulations, step), scale)
        noise = scheduler.step(torch.cat([output, output]), time, noise).prev_sample
    return noise[:rows]
