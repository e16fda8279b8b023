"""Masked parallel decoding: MaskGIT, MAGNeT, and what is made of the same pieces.

All tokens are hidden at first. Every step is one forward of a `MaskedModel`, draws all hidden tokens, keeps some of the
draws for good, and hides the others again; the last one keeps all. Codebooks are decoded one after the other. The law
of what comes out is the decoder's own: there is no autoregressive one to compare it with.

* Chang et al., "MaskGIT: masked generative image transformer", CVPR 2022, section 3.2.
* Ziv et al., "Masked audio generation using a single non-autoregressive transformer" (MAGNeT), ICLR 2024, section 3:
  spans, stages, falling guidance; section 3.4: rescoring with another model, which the released code does not have.
  `masked_hybrid` has its other addition, clips whose first seconds are autoregressive.
* Besnier et al., "Halton scheduler for masked generative image transformer", ICLR 2025.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import MaskedModel, Rescorer
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.checks import CheckedLaw, check_allowed, check_batch_size
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.masking import (
    CLOCKS,
    FIXED_ORDERS,
    SCHEDULES,
    SCORES,
    SPAN_SCORES,
    Spans,
    draw_and_score,
    fixed_order,
    hidden_counts,
    hidden_shares,
    least_sure,
    mixed,
)
from visual_spec.samplers.core.noise import CHOICE, CounterNoise, draw_keys
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult, Stopwatch

# Falling temperatures end here, not at 0 (MAGNeT's code).
_LEAST_TEMPERATURE = 0.01


@dataclass
class MaskedTrace(DecodeTrace):
    """A `DecodeTrace` of a masked decode. There is no prefill: call 0 is the first forward of the model.

    `commit_call` is the call at which all codebooks of a slot were there, 0 for slots that were given, and
    `tokens_per_call` counts slots that were decoded.

    Attributes:
        entry_call: long [B, L, K], the call at which each token was kept, -1 where it was given.
        rescorer_calls: forwards of the model that rescored.
        first_calls: long [B], how many of `target_calls` are those of the model that decoded the beginning (hybrid).
    """

    entry_call: Tensor = field(default_factory=lambda: torch.zeros(0))
    rescorer_calls: int = 0
    first_calls: Tensor | None = None

    @property
    def tokens_per_call(self) -> Tensor:
        """Decoded slots over target calls: float [B]."""
        return (self.entry_call >= 0).any(-1).sum(1) / self.target_calls.float()

    @property
    def output_law(self) -> str:
        """What the output law is, in words."""
        return "the law of masked decoding"


class MaskedSampler(SchedulerMixin, ConfigMixin):
    """Draws all hidden tokens at every step, and keeps the surest. `PRESETS` has the settings of the papers.

    Args:
        steps: forwards of each codebook: one number for all of them, or one for each.
        schedule: of the share that is hidden, one of `masking.SCHEDULES`.
        clock: "maskgit" ends the schedule behind the last step, "magnet" at it; see `masking.CLOCKS`.
        score: what is kept first, one of `masking.SCORES`.
        choice_temperature: standard Gumbel noise on the score is scaled by it, less and less: by the share of the steps
            that are left. 0: no noise.
        span: slots that are kept or hidden together. More than 1 for sequences only.
        span_score: "max" takes a span for as sure as its surest token, "sum" sums over them (with log-probabilities:
            the probability of the whole span).
        temperature: "constant" is the law's; "falling" scales it by the share of the steps that are left, to 0.01.
        guidance: "constant" is the law's scale; "falling" goes from it to `least_guidance` as less and less is hidden
            (MAGNeT), "rising" the other way (masked image models).
        least_guidance: at least 1, no guidance.
        filtered_score: score draws by the law they were drawn from; if not, by that law before top-k and top-p.
        rescorer_share: of the masked model in the probability of a draw, when another one rescores it.

    Raises:
        ValueError: an unknown name, or a number out of its range.
    """

    config_name = "sampler_config.json"
    lossless = False
    identical = False

    @register_to_config
    def __init__(
        self,
        steps: int | Sequence[int] = 8,
        schedule: str = "cosine",
        clock: str = "maskgit",
        score: str = "log_probability",
        choice_temperature: float = 0.0,
        span: int = 1,
        span_score: str = "max",
        temperature: str = "constant",
        guidance: str = "constant",
        least_guidance: float = 1.0,
        filtered_score: bool = False,
        rescorer_share: float = 0.5,
    ) -> None:
        for name, value, known in [
            ("schedule", schedule, SCHEDULES),
            ("clock", clock, CLOCKS),
            ("score", score, SCORES),
            ("span_score", span_score, SPAN_SCORES),
            ("temperature", temperature, ("constant", "falling")),
            ("guidance", guidance, ("constant", "falling", "rising")),
        ]:
            if value not in known:
                raise ValueError(f"{name}={value!r}; pass one of {', '.join(known)}.")
        counts = steps if isinstance(steps, (list, tuple)) else [steps]
        if not counts or not all(_at_least_one(count) for count in counts):
            raise ValueError(f"steps={steps!r}; pass an integer of at least 1, or one for each codebook.")
        if not _at_least_one(span):
            raise ValueError(f"span={span!r}; pass an integer of at least 1.")
        for name, number, least, most in [
            ("choice_temperature", choice_temperature, 0.0, math.inf),
            ("least_guidance", least_guidance, 1.0, math.inf),
            ("rescorer_share", rescorer_share, 0.0, 1.0),
        ]:
            if not math.isfinite(number) or not least <= number <= most:
                up_to = "" if most == math.inf else f" and at most {most:g}"
                raise ValueError(f"{name}={number}; pass a finite number of at least {least:g}{up_to}.")
        if choice_temperature and score in FIXED_ORDERS:
            raise ValueError(
                f"choice_temperature={choice_temperature} with score={score!r}, an order that no noise should change; "
                "pass choice_temperature=0."
            )

    @torch.no_grad()
    def __call__(
        self,
        model: MaskedModel,
        condition: Any,
        *,
        law: TokenLaw,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
        given: Tensor | None = None,
        rescorer: Rescorer | None = None,
        rescorer_condition: Any = None,
    ) -> SampleResult:
        """Decode a batch.

        Args:
            model: any `MaskedModel`.
            condition: what the model's `prepare` takes, `batch_size` rows of it.
            law: how logits become the distribution a token is drawn from. Its temperature and guidance are those that
                the settings vary.
            generator: one `torch.Generator` for the batch, a list of one a sample, or None (PyTorch's default).
            callback: called after every target call with its index, from 0, and the tokens that each sample has kept
                or was given, divided by the codebooks and rounded down: long [B], on the model's device.
            given: long [B, L, K] (or [B, L] of one codebook), tokens that are known already; the mask id where they are
                to be decoded. None: nowhere.
            rescorer: an autoregressive model of the same codes; draws are then ranked by a mixture of both models'
                probabilities (MAGNeT, section 3.4). It costs one forward a step, but for the last steps of codebooks.
                Codes that are still hidden are special to it, as are those outside of a clip.
            rescorer_condition: of the rescorer; None: the same as the model's.

        Returns:
            tokens long [B, L], or [B, L, K] of several codebooks, and a `MaskedTrace`.

        Raises:
            ValueError, TypeError: a request that cannot be served.
            FloatingPointError: logits that define no law.
        """
        settings: Any = self.config
        grid, codebooks = model.grid, model.grid.codebooks
        steps = self._check(model, law, batch_size, given, rescorer)
        keys = draw_keys(generator, batch_size)
        spans = Spans(grid.num_tokens, settings["span"])
        watch = Stopwatch()
        state = model.prepare(condition, batch_size=batch_size, guided=law.guided)
        device = state.device
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, grid.num_tokens * codebooks, deferred=device.type == "cuda")
        shape = (batch_size, grid.num_tokens, codebooks)
        tokens = torch.full(shape, model.mask_id, device=device)
        if given is not None:
            tokens.copy_(given.reshape(shape))
        entry_call = torch.full_like(tokens, -1)
        call = 0
        own = condition if rescorer_condition is None else rescorer_condition
        for stage in range(codebooks):
            unknown = tokens[..., stage] == model.mask_id  # [B, L], what this stage decodes
            hidden = spans.any(unknown)  # [B, U], the units that are not kept yet
            shares = hidden_shares(settings["schedule"], settings["clock"], steps[stage])
            number = hidden.sum(1)
            counts = [*hidden_counts(shares, settings["clock"], number), torch.zeros_like(number)]
            entries = _counters(spans.num_tokens, stage, codebooks, batch_size, device)
            units = _counters(spans.count, stage, codebooks, batch_size, device)
            order = None
            if settings["score"] in FIXED_ORDERS:
                order = fixed_order(settings["score"], grid, spans, noise, units)
            for step, share in enumerate(shares):
                left = 1 - (step + 1) / steps[stage]
                checked.law = self._law(law, share, left)
                logits = model(state, tokens, stage)  # [R, L, V]
                watch.lap("model", device)
                if not checked.law.guided:
                    logits = logits[:batch_size]
                drawing = unknown & spans.spread(hidden)  # [B, L]
                # What stands where nothing is drawn is no one's concern: it counts as past the grid.
                looked_at = torch.where(drawing, entries, checked.num_tokens)
                # The last step keeps all, whatever its score.
                asked = settings["score"] if order is None and left else None
                drawn, score = draw_and_score(
                    checked,
                    noise,
                    logits,
                    entries,
                    looked_at,
                    step,
                    score=asked,
                    filtered=settings["filtered_score"],
                )
                tokens[..., stage] = torch.where(drawing, drawn, tokens[..., stage])
                if score is None:
                    score = hidden.float() if order is None else order
                else:
                    if rescorer is not None:
                        watch.lap("verify", device)
                        score = self._rescored(score, rescorer, own, tokens, model.mask_id, stage)
                        watch.lap("rescore", device)
                    score = spans.score(score, drawing, settings["span_score"])
                    if settings["choice_temperature"]:
                        gumbel = noise.gumbel(units, 1, CHOICE, step, score.dtype)[..., 0]
                        score = score + settings["choice_temperature"] * left * gumbel
                stays = least_sure(score, hidden, counts[step + 1])  # [B, U]
                kept = drawing & spans.spread(hidden & ~stays)
                entry_call[..., stage].masked_fill_(kept, call)
                tokens[..., stage].masked_fill_(drawing & ~kept, model.mask_id)
                hidden = stays
                watch.lap("verify", device)
                if callback is not None:
                    callback(call, (tokens != model.mask_id).sum((1, 2)) // codebooks)
                call += 1
        checked.finish()
        seconds, phase_seconds = watch.read()
        trace = MaskedTrace(
            sampler=type(self).__name__,
            lossless=False,
            identical=False,
            target_calls=torch.full((batch_size,), call),
            commit_call=entry_call.amax(-1).clamp(min=0).cpu(),
            seconds=seconds,
            phase_seconds=phase_seconds,
            peak_memory=watch.peak_memory(device),
            entry_call=entry_call.cpu(),
            rescorer_calls=0 if rescorer is None else sum(max(count - 1, 0) for count in steps),
        )
        return SampleResult(tokens if codebooks > 1 else tokens[..., 0], trace)

    def _law(self, law: TokenLaw, share: float, left: float) -> TokenLaw:
        """The law of a step at which `share` is hidden, with `left` of the steps behind it."""
        settings: Any = self.config
        scale, temperature = law.guidance_scale, law.temperature
        if law.guided and settings["guidance"] != "constant":
            weight = share if settings["guidance"] == "falling" else 1 - share
            scale = weight * scale + (1 - weight) * settings["least_guidance"]
        if settings["temperature"] == "falling" and temperature:
            temperature = max(temperature * left, _LEAST_TEMPERATURE)
        return replace(law, guidance_scale=scale, temperature=temperature)

    def _rescored(
        self, sure: Tensor, rescorer: Rescorer, condition: Any, tokens: Tensor, mask_id: int, stage: int
    ) -> Tensor:
        """`sure` [B, L] of the draws in `tokens` [B, L, K], mixed with what the rescorer says of them."""
        codes = tokens.masked_fill(tokens == mask_id, rescorer.special_id).transpose(1, 2)
        logits = rescorer.teacher_forced(codes, condition)[:, stage]  # [B, L, V]
        other = TokenLaw()(logits, False).gather(-1, codes[:, stage, :, None])[..., 0].to(sure)
        share = self.config["rescorer_share"]
        if self.config["score"] == "log_probability":
            return mixed(sure, other, share)
        return share * sure + (1 - share) * other.exp()

    def _check(
        self,
        model: MaskedModel,
        law: TokenLaw,
        batch_size: int,
        given: Tensor | None,
        rescorer: Rescorer | None,
    ) -> list[int]:
        """The steps of each codebook, if the request can be served."""
        settings: Any = self.config
        if not (hasattr(model, "mask_id") and hasattr(model, "prepare")):
            raise ValueError(
                f"{type(model).__name__} hides no tokens; this sampler decodes masked models, such as MagnetModel. Use "
                "AutoregressiveSampler or ColumnAutoregressiveSampler."
            )
        grid, codebooks = model.grid, model.grid.codebooks
        check_batch_size(batch_size)
        check_allowed(law, model.vocab_size)
        if law.guidance_until is not None:
            raise ValueError(
                f"guidance_until={law.guidance_until}, but masked decoding knows no order of slots; pass "
                "guidance_until=None, and guidance='falling' or 'rising' to the sampler."
            )
        steps = settings["steps"]
        steps = [steps] * codebooks if isinstance(steps, int) else list(steps)
        if len(steps) != codebooks:
            raise ValueError(
                f"steps={tuple(steps)} are those of {len(steps)} codebooks, and the model has {codebooks}; pass "
                f"{codebooks} numbers, or one for all codebooks."
            )
        span = settings["span"]
        if span > 1 and (span > grid.num_tokens or grid.num_tokens != grid.width):
            size = f"{grid.frames} x {grid.height} x {grid.width} slots"
            raise ValueError(
                f"span={span}, but the model decodes {size}; pass "
                + (f"1 to {grid.width}." if grid.num_tokens == grid.width else "1: spans are for sequences.")
            )
        if given is not None:
            shapes = [(batch_size, grid.num_tokens, codebooks)]
            shapes += [shapes[0][:2]] if codebooks == 1 else []
            if tuple(given.shape) not in shapes or given.dtype != torch.long:
                raise ValueError(
                    f"given is {given.dtype} of shape {tuple(given.shape)}; pass int64 {shapes[-1]}, with the mask id "
                    f"{model.mask_id} where a token is to be decoded."
                )
            known = given[given != model.mask_id]
            if known.numel() and not 0 <= int(known.min()) <= int(known.max()) < model.vocab_size:
                raise ValueError(
                    f"given holds ids from {int(known.min())} to {int(known.max())}; tokens are 0 to "
                    f"{model.vocab_size - 1}, and the mask is {model.mask_id}."
                )
            if known.numel() == given.numel():
                raise ValueError("all tokens are given; leave some at the mask id to have them decoded.")
            # A codebook that is given whole costs no calls.
            to_do = (given.reshape(shapes[0]) == model.mask_id).flatten(0, 1).any(0).tolist()
            steps = [count if some else 0 for count, some in zip(steps, to_do, strict=True)]
        if rescorer is not None:
            if rescorer.vocab_size != model.vocab_size:
                raise ValueError(
                    f"the rescorer knows {rescorer.vocab_size} codes, and the model {model.vocab_size}; pass two "
                    "models of the same codec."
                )
            if rescorer.num_frames != grid.num_tokens:
                raise ValueError(
                    f"the rescorer is made for clips of {rescorer.num_frames} frames, and the model for "
                    f"{grid.num_tokens}; pass one for as many frames."
                )
            if settings["score"] not in ("log_probability", "probability"):
                raise ValueError(
                    f"score={settings['score']!r} asks for no probability of a draw, so there is nothing to rescore; "
                    "pass score='log_probability' or 'probability', or no rescorer."
                )
        return steps


def _at_least_one(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _counters(count: int, stage: int, codebooks: int, batch_size: int, device: torch.device) -> Tensor:
    """Counter slots of a codebook's tokens or units: long [B, count]. They are those of `columns.Entries`."""
    return (torch.arange(count, device=device) * codebooks + stage).expand(batch_size, -1)


# -- presets -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedPreset:
    """Published settings: those of the sampler, `MaskedSampler(**settings)`, and the law."""

    settings: dict[str, Any]
    law: TokenLaw


_MAGNET = dict(
    clock="magnet", span=3, span_score="max", temperature="falling", guidance="falling", least_guidance=1.0
)
_MUSIC = TokenLaw(guidance_scale=10.0, temperature=3.0, top_p=0.9)
_SOUND = TokenLaw(guidance_scale=20.0, temperature=3.5, top_p=0.8)

PRESETS = {
    "maskgit": MaskedPreset(dict(steps=8, choice_temperature=4.5), TokenLaw()),
    "mage": MaskedPreset(dict(steps=20, choice_temperature=6.0), TokenLaw()),
    # Its noise falls from 2 at the first step to 0 at the last of 12.
    "amused": MaskedPreset(dict(steps=12, choice_temperature=2.0 * 12 / 11), TokenLaw(guidance_scale=10.0)),
    "halton": MaskedPreset(dict(steps=32, schedule="arccos", score="halton"), TokenLaw()),
    # The audio models differ in the length they were trained for, and in what they were trained on. The released
    # interface decodes all of them with the first one's settings; these are those of the training configurations.
    "magnet-10s": MaskedPreset(dict(steps=(20, 10, 10, 10), **_MAGNET), _MUSIC),
    "magnet-30s": MaskedPreset(dict(steps=(60, 10, 10, 10), **_MAGNET), _MUSIC),
    "audio-magnet-10s": MaskedPreset(dict(steps=(20, 10, 10, 10), **_MAGNET), _SOUND),
}
