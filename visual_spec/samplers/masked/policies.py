"""What masked decoders decide by: how many tokens stay hidden, which are kept, and the law of a step.

Published decoders are settings of these (`presets`).

* Chang et al., "MaskGIT: masked generative image transformer", CVPR 2022, section 3.2.
* Ziv et al., "Masked audio generation using a single non-autoregressive transformer" (MAGNeT), ICLR 2024, section 3.
* Besnier et al., "Halton scheduler for masked generative image transformer", ICLR 2025.
* Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded unmasking", 2505.24857.
* Wu et al., "Fast-dLLM", 2505.22618, section 3.3: `threshold` and `factor`.
* Li et al., "Diffusion language models know the answer before decoding" (Prophet), 2508.19982: `commit_gaps`.
* Wang et al., "CreditDecoding", 2510.06133, as in inclusionAI/dInfer: `credit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Annotated

import torch
from torch import Tensor

from visual_spec.kernels.law import law_reference
from visual_spec.models.core.settings import SHARE, OneOf, Within, read_fields
from visual_spec.samplers.core.law import LARGEST, TokenLaw
from visual_spec.samplers.core.masking import (
    CLOCKS,
    FIXED_ORDERS,
    SCHEDULES,
    SCORES,
    beyond_confidence,
    beyond_entropy_bound,
    least_sure,
)

# Falling temperatures end at this value, not at 0 (MAGNeT's code).
_LEAST_TEMPERATURE = 0.01
# The temperature of a codebook that is drawn in one step, where temperatures fall before the steps (MaskGCT's code).
_SINGLE_TEMPERATURE = 0.2
# A token earns its probability to this power, and keeps this share of what it earned from call to call (dInfer's code).
_CREDIT_POWER, _CREDIT_KEPT = 0.2, 0.8
# Settings by which draws decide how many tokens a step keeps.
_RULES = ("entropy_bound", "threshold", "factor", "commit_gaps")
# Shares of the steps at which the second and the third of `commit_gaps` begin (Prophet's code).
_PHASES = (0.33, 0.67)


@dataclass(frozen=True)
class Schedule:
    """How many tokens stay hidden after each step.

    Attributes:
        schedule: of the hidden share, one of `masking.SCHEDULES`.
        clock: "maskgit" ends the schedule after the last step, "magnet" at it; see `masking.CLOCKS`.
        entropy_bound: None keeps what the schedule says. A number lets each step keep as many of the surest tokens as
            this bound on their entropy allows (`masking.beyond_entropy_bound`), until all are kept or the last step,
            which keeps the rest. What changes from step to step follows `schedule` as without a bound. For models of
            one codebook.
        threshold: likewise, each step keeps the tokens whose score, as a probability, is at least this, and one at
            least (Fast-dLLM). `score` is then "log_probability" or "probability"; `score_temperature=1` as published.
        factor: likewise, each step keeps the n tokens of highest score while the n-th is at least 1 - factor / (n + 1).
        commit_gaps: three numbers, one for each third of the steps. All tokens are kept as soon as the gap between the
            two largest logits of the law that scores, a mean over all tokens to decode, is at least the number
            (Prophet: 7.5, 5 and 2.5).
    """

    schedule: Annotated[str, OneOf(tuple(SCHEDULES))] = "cosine"
    clock: Annotated[str, OneOf(tuple(CLOCKS))] = "maskgit"
    entropy_bound: Annotated[float | None, Within(0)] = None
    threshold: Annotated[float | None, SHARE] = None
    factor: Annotated[float | None, Within(above=0)] = None
    commit_gaps: Annotated[Sequence[float] | None, Within(0)] = None

    def __post_init__(self) -> None:
        read_fields(self)
        rules = [name for name in _RULES if getattr(self, name) is not None]
        if len(rules) > 1:
            raise ValueError(f"{' and '.join(rules)} decide about the same tokens; pass one of them.")
        if self.commit_gaps is not None and len(self.commit_gaps) != len(_PHASES) + 1:
            raise ValueError(f"commit_gaps={tuple(self.commit_gaps)}; pass {len(_PHASES) + 1} numbers.")

    @cached_property
    def rule(self) -> str | None:
        """The setting by which draws decide how many calls a sample takes; None: the schedule does."""
        return next((name for name in _RULES if getattr(self, name) is not None), None)

    @cached_property
    def reads(self) -> str | None:
        """What a rule reads of the laws; None: nothing.

        The "entropy" of the law that a token is drawn from, or the "gap" between the two largest logits of the law that
        scores it.
        """
        return {"entropy_bound": "entropy", "commit_gaps": "gap"}.get(self.rule or "")

    def refused(
        self, score: Tensor, hidden: Tensor, count: Tensor, done: float, read: Tensor | None
    ) -> Tensor:
        """Which of the `hidden` units, bool [B, U], the rule leaves hidden, whatever the schedule says.

        Args:
            score: [B, U]; a probability for `threshold` and `factor`.
            count: long [B], what the schedule leaves hidden.
            done: the share of steps that are made, this one included.
            read: entropies [B, U] or mean gaps [B], see `reads`.
        """
        if self.entropy_bound is not None:
            assert read is not None
            return beyond_entropy_bound(score, read, hidden, self.entropy_bound)
        if self.commit_gaps is not None:
            assert read is not None
            enough = read >= self.commit_gaps[sum(done >= start for start in _PHASES)]
            return least_sure(score, hidden, count) & ~enough[:, None]
        least = torch.full_like(score[0], self.threshold or 0)
        if self.factor is not None:
            least = 1 - self.factor / torch.arange(2, len(least) + 2, device=score.device)
        return beyond_confidence(score, hidden, least)


@dataclass(frozen=True)
class Choice:
    """How tokens are drawn and scored; the highest scores are kept.

    Attributes:
        score: what is kept first, one of `masking.SCORES`.
        choice_temperature: scale of the Gumbel noise on the score, times the share of steps that are left. 0: no noise.
        filtered_score: score draws by the law they were drawn from. False: by that law before top-k and top-p.
        score_temperature: score draws by the law of this temperature, above 0. None: the temperature of the draw.
        second_draw: score another, independent draw from the law that scores, and keep the token all the same (ReCAP's
            code).
        greedy: take the likeliest tokens, and score them by the law with its temperature, which decides about their
            order where it falls (MAGNeT's code with use_sampling=False). A law of temperature 0 takes the same tokens,
            and scores them at temperature 1.
    """

    score: Annotated[str, OneOf(tuple(SCORES))] = "log_probability"
    choice_temperature: Annotated[float, Within(0)] = 0.0
    filtered_score: bool = False
    score_temperature: Annotated[float | None, Within(above=0, most=LARGEST)] = None
    second_draw: bool = False
    greedy: bool = False

    def __post_init__(self) -> None:
        read_fields(self)
        if self.choice_temperature and self.score in FIXED_ORDERS:
            raise ValueError(
                f"choice_temperature={self.choice_temperature} with score={self.score!r}, an order that no noise "
                "should change; pass choice_temperature=0."
            )
        if self.second_draw and not self.of_draws:
            raise ValueError(
                f"second_draw=True with score={self.score!r}, which looks at no draw; pass second_draw=False."
            )

    @property
    def of_draws(self) -> bool:
        """Whether the score is a probability of the draw."""
        return self.score in ("log_probability", "probability")


@dataclass(frozen=True)
class LawByStep:
    """How temperature and guidance of the law change from step to step.

    Attributes:
        temperature: "constant" uses the law's; "falling" scales it by the share of steps that are left, down to 0.01
            (MAGNeT), or, if it falls "before" the steps, to the likeliest tokens in the last of them, but 0.2 in a
            single one (MaskGCT); "root" lets it fall to the share `last_temperature` of itself, as the root of the
            steps (ReCAP), and "sharpening" so that its inverse rises evenly (the Halton sampler's code: to 1 / 1.2).
        last_temperature: see `temperature`.
        falls: the share of steps by which noise and temperature fall is what is left "after" a step (MaskGIT, MAGNeT)
            or "before" it (MaskGCT), or the "product" of what is left after it and all steps before (Lumos-1's code).
            "full" counts full calls only (ReCAP's code): "after" where all are. "never": they stay (Lumina-DiMOO).
        guidance: "constant" uses the law's scale; "falling" goes from it to `least_guidance` as the hidden share falls
            (MAGNeT); "rising" goes the other way (masked image models); "ramp" rises evenly from step to step.
        least_guidance: at least 1, which means no guidance.
        guided_steps: calls of each codebook with guidance, from the first; None: all. `MaskedSampler` computes no
            unconditional row in later calls, so they cost half. Frames, and replayed CUDA graphs, still compute them.
        warmup: steps at the beginning of each codebook with twice the temperature (the Halton sampler's code).
        credit: weight of what tokens earned by being the likeliest of a slot in this call and earlier ones. Log(1 + the
            sum) is added to their logits (dInfer: 0.7). 0: none.
    """

    temperature: Annotated[str, OneOf(("constant", "falling", "root", "sharpening"))] = "constant"
    last_temperature: Annotated[float, SHARE] = 0.7
    falls: Annotated[str, OneOf(("after", "before", "product", "full", "never"))] = "after"
    guidance: Annotated[str, OneOf(("constant", "falling", "rising", "ramp"))] = "constant"
    least_guidance: Annotated[float, Within(1)] = 1.0
    guided_steps: Annotated[int | None, Within(0)] = None
    warmup: Annotated[int, Within(0)] = 0
    credit: Annotated[float, Within(0)] = 0.0

    def __post_init__(self) -> None:
        read_fields(self)
        if self.temperature == "sharpening" and self.last_temperature == 0:
            raise ValueError("last_temperature=0.0 with temperature='sharpening'; pass a share above 0.")

    def left(self, steps: int) -> list[float]:
        """The share of the steps that is left at each, by which noise and temperature fall."""
        after = [1 - (step + 1) / steps for step in range(steps)]
        if self.falls == "product":
            return list(accumulate(after, mul))
        if self.falls == "never":
            return [1.0] * steps
        return [1 - step / steps for step in range(steps)] if self.falls == "before" else after

    def law(self, law: TokenLaw, share: float, step: int, left: Sequence[float]) -> TokenLaw:
        """The law of a step at which `share` is hidden. `left`: by which temperatures fall, at every step."""
        scale, temperature = law.guidance_scale, law.temperature
        steps = len(left)
        past = step / max(steps - 1, 1)
        if law.guided and self.guidance != "constant":
            weight = {"falling": share, "rising": 1 - share, "ramp": past}[self.guidance]
            scale = weight * scale + (1 - weight) * self.least_guidance
        if self.guided_steps is not None and step >= self.guided_steps:
            scale = 1.0
        if self.temperature == "falling" and temperature:
            temperature = max(temperature * left[step], _LEAST_TEMPERATURE)
            if self.falls == "before" and step + 1 == steps:
                temperature = 0.0 if step else _SINGLE_TEMPERATURE
        if self.temperature == "root":
            temperature *= 1 - (1 - self.last_temperature) * past**0.5
        if self.temperature == "sharpening":
            temperature /= 1 + (1 / self.last_temperature - 1) * past
        if step < self.warmup:
            temperature *= 2
        if (scale, temperature) == (law.guidance_scale, law.temperature):
            return law  # its numbers are known
        return replace(law, guidance_scale=scale, temperature=temperature)

    def earned(self, law: TokenLaw, logits: Tensor, hidden: Tensor, before: Tensor | None) -> Tensor:
        """What tokens earned up to a call, [B, L, V], from its logits `[R, L, V]` and what they earned `before`.

        `hidden`: bool [B, L], the slots that are drawn.
        """
        numbers = law.numbers(law.guided, logits.shape[-1])._replace(temperature=1.0, top_k=0, top_p=1.0)
        best = law_reference(logits, None, numbers).max(-1)
        share = torch.where(hidden, (_CREDIT_POWER * best.values).exp(), 0)
        kept = (
            best.values.new_zeros(*hidden.shape, logits.shape[-1])
            if before is None
            else _CREDIT_KEPT * before
        )
        return kept.scatter_add(2, best.indices[..., None], share[..., None])
