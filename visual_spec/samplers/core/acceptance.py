"""Rules that decide whether a draft is kept, and what replaces it.

A rule compares two laws: the target law (the model's law at a slot), and the draft law (the law that the draft at that
slot was truly drawn from). Both are log-probabilities, -inf outside the support. `Relaxation` holds the settings of the
relaxed rules, which `relaxed` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.settings import COUNT, SHARE, OneOf, Within, read_fields

GROUPED = "grouped"
CLUSTERED = "clustered"
LANTERN = "lantern"
RELAXED = (GROUPED, CLUSTERED, LANTERN)


def exact_acceptance(target: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
    """Return the probability of keeping each draft, min(1, target / draft).

    With `residual` as the replacement, the committed token follows the target law exactly (Leviathan, Kalman,
    Matias, "Fast inference from transformers via speculative decoding", ICML 2023, theorem in appendix A.1).

    Args:
        target, draft_law: [B, N, V] log-probabilities.
        drafts: long [B, N].

    Returns:
        [B, N], of the laws' dtype.
    """
    at = drafts[..., None]
    return (target.gather(-1, at) - draft_law.gather(-1, at)).exp_().clamp_(max=1).squeeze(-1)


def residual(target: Tensor, draft_law: Tensor) -> Tensor:
    """Return the law that replaces a refused draft, (target - draft)+ normalised: [B, N, V] log-probabilities.

    A slot without a draft has the draft law zero (-inf everywhere), so its residual is the target itself. Where the
    difference has no mass, both laws are equal and no draft is ever refused; the function returns the target there.
    """
    difference = target.exp().sub_(draft_law.exp()).clamp_(min=0)
    mass = difference.sum(-1, keepdim=True)
    return torch.where(mass > 0, difference.div_(mass).log_(), target)


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule together with the tables it needs.

    Attributes:
        probability: function of target [B, N, V], draft law [B, N, V] and drafts [B, N]; returns the probability of
            keeping each draft, [B, N].
        merge: for a rule that lends a draft the mass of other tokens. Function of target [B, N, V] and drafts [B, N]
            (-1 where a slot has none); returns the law [B, N, V] that takes the target's place in `residual`.
        lossless: whether the committed token follows the target law.
        after_refusal: for a rule with a budget per slot. Returns the rule for the next sibling, from the probability
            [B, N] of keeping this one, its target, its draft law, and the drafts (-1 where a slot has none).
        identical: keep a draft exactly when it is the token that the slot's own noise draws. The labels of drafts are
            not used.
        whole: for a rule that tests the drafts of a chain together, the test, as `raster.block.verify_block`.
    """

    probability: Callable[[Tensor, Tensor, Tensor], Tensor] = exact_acceptance
    merge: Callable[[Tensor, Tensor], Tensor] | None = None
    lossless: bool = True
    after_refusal: Callable[[Tensor, Tensor, Tensor, Tensor], AcceptanceRule] | None = None
    identical: bool = False
    whole: Callable[..., tuple[Tensor, Tensor]] | None = None

    def refused_target(self, target: Tensor, drafts: Tensor) -> Tensor:
        """Return the law whose `residual` replaces a refused draft. Arguments and result as in `merge`."""
        return target if self.merge is None else self.merge(target, drafts)

    def next_rule(
        self, probability: Tensor, target: Tensor, draft_law: Tensor, drafts: Tensor
    ) -> AcceptanceRule:
        """Return the rule for the sibling after a refused draft. Arguments as in `after_refusal`."""
        return (
            self if self.after_refusal is None else self.after_refusal(probability, target, draft_law, drafts)
        )


EXACT = AcceptanceRule()
IDENTICAL = AcceptanceRule(identical=True)


def accepted_prefix(accept: Tensor) -> Tensor:
    """Return how many drafts are kept before the first refusal: BoolTensor [..., N] to long [...]."""
    return accept.long().cumprod(-1).sum(-1)


@dataclass(frozen=True)
class Relaxation:
    """The settings of an acceptance rule, plain values only. `relaxed.rule_of` adds the tables.

    Args:
        acceptance: "grouped", "clustered" or "lantern"; or "exact", "identical" or "block", which relax nothing.
        group_size: tokens of a group; for "clustered" the mean size.
        probability_gap, code_distance: filters of "grouped"; code_distance None needs no codebook.
        delta: mass that LANTERN lends a draft; with `bounded`, the most that any rule may move at a slot.
        factor: LANTERN++'s lambda, which then limits the lent mass in place of delta.
        neighbours: how many codes may lend mass, K of the neighbour table. (LANTERN's code: 1000.)
        codes: which codes are compared where a pipeline hands them over: "decoded", as the decoder sees them, or "raw",
            as the tokenizer stores them (LANTERN's code).
        bounded: limit the rule to `delta` by `relaxed.bounded_acceptance`; replace refused drafts from `residual`. The
            siblings of a slot share the budget.
    """

    acceptance: Annotated[str, OneOf(("identical", "exact", "block", *RELAXED))]
    group_size: Annotated[int, COUNT] = 14
    probability_gap: Annotated[float, SHARE] = 0.15
    code_distance: Annotated[float | None, Within(0, none="any distance")] = 0.5
    delta: Annotated[float, SHARE] = 0.1
    factor: Annotated[float | None, Within(1, none="lending up to delta")] = None
    neighbours: Annotated[int, COUNT] = 64
    bounded: bool = False
    codes: Annotated[str, OneOf(("decoded", "raw"))] = "decoded"

    def __post_init__(self) -> None:
        read_fields(self)

    @classmethod
    def names(cls) -> list[str]:
        """The settings that a sampler takes as one mapping."""
        return [field.name for field in fields(cls) if field.name != "acceptance"]

    @classmethod
    def of(cls, acceptance: str, settings: Mapping[str, Any] | None = None) -> Relaxation:
        """Return the record for a name and a mapping of the other settings, as in a sampler's configuration.

        Args:
            acceptance: as in the class.
            settings: values by name, such as {"delta": 0.2}; others keep their defaults. None: all defaults.

        Raises:
            ValueError: `settings` is not a mapping, names an unknown setting, is given for an acceptance that relaxes
                nothing, or holds a value out of its range.
        """
        if settings is None:
            return cls(acceptance)
        if not isinstance(settings, Mapping):
            raise ValueError(
                f'relaxation={settings!r}; pass settings by name, such as {{"delta": 0.2}}, or None.'
            )
        known = cls.names()
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise ValueError(f"relaxation has no setting {unknown[0]!r}; pass some of {', '.join(known)}.")
        relaxation = cls(acceptance, **settings)
        if settings and relaxation.lossless:
            raise ValueError(
                f"relaxation sets {', '.join(settings)}, but acceptance={acceptance!r} relaxes nothing; pass "
                f"relaxation=None, or acceptance={', '.join(map(repr, RELAXED[:-1]))} or {RELAXED[-1]!r}."
            )
        return relaxation

    @property
    def lossless(self) -> bool:
        """Whether committed tokens always follow the target law exactly."""
        return self.acceptance not in RELAXED

    @property
    def needs_codebook(self) -> bool:
        """Whether `relaxed.rule_of` needs the codes."""
        by_distance = self.acceptance == GROUPED and self.code_distance is not None
        return by_distance or self.acceptance in (CLUSTERED, LANTERN)

    def check(self, codebook: Tensor | None, vocab_size: int) -> None:
        """Refuse, before any compute, a codebook that does not fit the model. `codebook`: [V, D] or None.

        Raises:
            ValueError: a required codebook is missing, has another shape, or has fewer codes than the settings need.
        """
        if not self.needs_codebook:
            return
        if codebook is None:
            remedy = " or code_distance=None" if self.acceptance == GROUPED else ""
            raise ValueError(
                f"acceptance={self.acceptance!r} compares codes, but no codebook was given; pass codebook=, the codes "
                f"[{vocab_size}, D] as they are decoded (VQModel.quantize.codes){remedy}."
            )
        if codebook.ndim != 2 or codebook.shape[0] != vocab_size:
            raise ValueError(
                f"codebook of shape {tuple(codebook.shape)} for a vocabulary of {vocab_size} tokens; pass one code a "
                f"token, [{vocab_size}, D]."
            )
        if self.acceptance == LANTERN and self.neighbours >= vocab_size:
            raise ValueError(
                f"neighbours={self.neighbours}, but a code has {vocab_size - 1} others; pass at most that many."
            )


def _check_numbers(name: str, numbers: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> None:
    Relaxation.of(settings["acceptance"], numbers)


# Settings of samplers that know relaxed rules.
RelaxedAcceptance = Annotated[str, OneOf(("identical", "exact", *RELAXED))]
RelaxedNumbers = Annotated[Mapping[str, Any] | None, _check_numbers]
