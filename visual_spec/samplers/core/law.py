"""The law of a token: the distribution that a token is sampled from, computed from raw logits.

It is applied once, to target and drafter alike, and never to a residual: filtering a residual again changes the output
law (with top-p below 1, or a temperature other than 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from visual_spec.kernels.law import EVERY_SLOT, LawNumbers, law_reference, non_finite
from visual_spec.models.core.settings import LARGEST, LAW_SETTINGS, LawSettings, Within, read_fields

# Below this, dividing large logits overflows float32.
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class TokenLaw(LawSettings):
    """Guidance, allowed range, temperature, top-k and top-p, applied in this order, then normalised.

    The order is the one of LlamaGen's and Hugging Face's samplers, so figures published with them carry over.

    Args:
        guidance_scale, temperature, top_k, top_p, guidance_until: see `LawSettings`.
        allowed: half-open range (first, last + 1) of token ids; None allows the whole vocabulary.
        history: rules that read the tokens before the slot (`history.HistoryRule`), applied in this order after
            guidance and before the rest, as transformers does.
        end: the token after which a sample holds nothing else; None: samples fill the grid.

    Raises:
        ValueError: a value is out of its range.
    """

    allowed: tuple[int, int] | None = None
    history: tuple[Callable[..., Tensor], ...] = ()
    end: Annotated[int | None, Within(0, none="samples that fill the grid")] = None

    def __post_init__(self) -> None:
        read_fields(self)
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature}; pass 0 (greedy), or a finite number of at least "
                f"{_LEAST_TEMPERATURE} and at most {LARGEST:g}."
            )
        if self.allowed is not None:
            _check_range(self.allowed)
        if not isinstance(self.history, tuple) or not all(map(callable, self.history)):
            raise ValueError(
                f"history={self.history!r}; pass a tuple of rules, such as (RepetitionPenalty(1.2),)."
            )

    @property
    def reads_text(self) -> bool:
        """Whether the law of a slot depends on the tokens before it beyond the logits."""
        return bool(self.history) or self.end is not None

    @property
    def guided(self) -> bool:
        """Whether the model must also run unconditional rows."""
        return self.guidance_scale > 1 and self.guidance_until != 0

    def numbers(self, guided: bool, vocab_size: int) -> LawNumbers:
        """Return the law as plain numbers for `visual_spec.kernels`; `guided` belongs to a call.

        Raises:
            ValueError: the law reads the tokens before the slot, which logits alone do not tell.
        """
        if self.history or self.end is not None:
            raise ValueError(
                f"history={self.history!r} and end={self.end!r} read the tokens before the slot; decode with "
                "AutoregressiveSampler or SpeculativeJacobiSampler, or leave them out."
            )
        settings = {name: getattr(self, name) for name in LAW_SETTINGS}
        if self.guidance_until is None:
            settings["guidance_until"] = EVERY_SLOT
        first, stop = self.allowed or (0, vocab_size)
        return LawNumbers(guided, first=first, stop=stop, **settings)

    def __call__(self, logits: Tensor, guided: bool, slots: Tensor | None = None) -> Tensor:
        """Return the law at every position of a window.

        Args:
            logits: [R, W, V]; R = 2B when guided (B conditional rows, then B unconditional ones), else B.
                -inf is legal and forbids a token (with guidance: when either row has it).
            guided: whether the logits hold unconditional rows.
            slots: long [B, W], the grid slots that the positions predict; only `guidance_until` needs them.

        Returns:
            Log-probabilities [B, W, V], -inf outside the support; float64 for float64 logits, else float32.

        Raises:
            ValueError: the logits have another shape or an odd number of guided rows, `allowed` exceeds the
                vocabulary, or guided logits come without the slots that `guidance_until` needs.
        """
        if logits.dim() != 3:
            raise ValueError(f"logits have shape {tuple(logits.shape)}; pass [rows, window, vocabulary].")
        vocab_size = logits.shape[-1]
        if self.allowed is not None and self.allowed[1] > vocab_size:
            raise ValueError(
                f"allowed={self.allowed} reaches beyond the vocabulary of {vocab_size} tokens; "
                f"pass a range within (0, {vocab_size})."
            )
        if guided and logits.shape[0] % 2:
            raise ValueError(
                f"guided logits have {logits.shape[0]} rows; pass an even number: "
                "the conditional rows, then as many unconditional ones."
            )
        if guided and self.guidance_until is not None and slots is None:
            raise ValueError(
                f"guidance_until={self.guidance_until} depends on the slot, but no slots were given; pass the slots "
                "[B, W] that the logits predict, or guidance_until=None."
            )
        return law_reference(logits, slots, self.numbers(guided, vocab_size))


def check_finite(
    logits: Tensor,
    slots: Tensor,
    allowed: tuple[int, int] | None = None,
    samples: Tensor | None = None,
) -> None:
    """Refuse logits that define no law. Synchronises on CUDA.

    Args:
        logits: [R, W, V], R a multiple of B.
        slots: [B, W], the grid slots that the positions predict.
        allowed: the law's allowed range; other ids are not checked.
        samples: [B], the numbers that the message uses for the samples; default 0, 1, ...

    Raises:
        FloatingPointError: some row and position has nan, +inf, or only -inf; names sample, position and slot.
    """
    if allowed is not None:
        logits = logits[..., slice(*allowed)]
    bad = non_finite(logits)
    if not bad.any():
        return
    row, column = bad.nonzero()[0].tolist()
    batch_size = slots.shape[0]
    sample = row % batch_size
    number = sample if samples is None else int(samples[sample])
    rows = "" if logits.shape[0] == batch_size else (" conditional" if row < batch_size else " unconditional")
    values = logits[row, column]
    held = "nan" if values.isnan().any() else "+inf" if values.isposinf().any() else "only -inf"
    raise FloatingPointError(
        f"the{rows} logits of sample {number} (row {row}), column {column}, slot {slots[sample, column]} "
        f"hold {held}; a law needs finite logits, or -inf for forbidden tokens beside a finite one. "
        "Check the weights, or run the model in float32 or bfloat16 if it overflows in float16."
    )


def _check_range(allowed: tuple[int, int]) -> None:
    proper = len(allowed) == 2 and all(isinstance(bound, int) for bound in allowed)
    if not proper or not 0 <= allowed[0] < allowed[1]:
        raise ValueError(
            f"allowed={allowed}; pass (first, last + 1), two integers with 0 <= first < last + 1."
        )
