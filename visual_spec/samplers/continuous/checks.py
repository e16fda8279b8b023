"""Requests that samplers of continuous tokens refuse, before any compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visual_spec.models.core.continuous import ChainSettings
from visual_spec.samplers.continuous.conditions import is_causal
from visual_spec.samplers.continuous.rules import Rule
from visual_spec.samplers.core.law import TokenLaw


def check_continuous_drafter(sampler: Any, model: Any, drafter: Any) -> None:
    """Refuse a drafter whose drafts the model could not score.

    Raises:
        ValueError: there is none, or its tokens, their number, their order or its calls differ; says what fits.
    """
    grid, dim = model.grid, model.token_dim
    fits = f"{grid.height} x {grid.width} tokens of {dim} numbers"
    if drafter is None:
        raise ValueError(
            f"{type(sampler).__name__} needs a drafter, and got none; pass drafter=..., a smaller model of {fits}."
        )
    offered = getattr(drafter, "grid", None), getattr(drafter, "token_dim", None)
    if offered != (grid, dim):
        other = offered[0]
        draws = (
            "no such tokens"
            if other is None
            else f"{other.height} x {other.width} tokens of {offered[1]} numbers"
        )
        raise ValueError(
            f"the drafter draws {draws}, but the model {fits}; pass a drafter for the model's tokens."
        )
    if is_causal(model) != is_causal(drafter):
        kinds = {True: "causal", False: "masked"}
        raise ValueError(
            f"the drafter is a {kinds[is_causal(drafter)]} model, and the model a {kinds[is_causal(model)]} one; pass "
            "one of the same kind."
        )
    if is_causal(model) and model.places.tolist() != drafter.places.tolist():
        raise ValueError(
            "the drafter decodes the grid in another order than the model; pass one of the same order."
        )


def check_rule(rule: Rule, name: str, settings: ChainSettings, model: Any, law: TokenLaw) -> None:
    """Refuse a rule for chains whose densities it could not compare.

    Raises:
        ValueError: the chain has noise that the rule cannot have, or lacks noise that it needs; says what to set.
    """
    deterministic = model.schedule(settings.head_steps, settings.eta).deterministic
    if rule.final_noise and settings.final_noise == 0:
        raise ValueError(
            f"rule={name!r} compares laws of the last level, which adds no noise (final_noise=0), so it would keep no "
            "draft; set final_noise, such as 0.05, of this sampler and of plain decoding, or of the model; or take "
            "another rule."
        )
    if rule.steps == "none" and (not deterministic or settings.final_noise):
        raise ValueError(
            f"rule={name!r} is for chains with noise at their start only, and this one has eta={settings.eta} "
            f"and final_noise={settings.final_noise}; set eta=0 and final_noise=0 of this sampler and of plain "
            "decoding, or take another rule."
        )
    if rule.steps == "some" and deterministic:
        raise ValueError(
            f"rule={name!r} compares laws of every step, and the steps of this chain add no noise (eta="
            f"{settings.eta}); set eta above 0, such as 1, of this sampler and of plain decoding, or take another rule."
        )
    if rule.lossless and law.temperature == 0:
        raise ValueError(f"rule={name!r} has no densities at temperature 0; pass one above 0.")
    if not rule.truncates and is_causal(model):
        raise ValueError(
            f"rule={name!r} scores drafts without those before them, which a causal model cannot; pass a masked model, "
            "or another rule."
        )


def check_drafts(tokens: Tensor, tested: Tensor, places: Tensor) -> None:
    """Refuse drafts [B, N, d] that are not finite, where bool [B, N] `tested`. `places`: long [B, >= N].

    Raises:
        FloatingPointError: names the first.
    """
    bad = (tested & ~tokens.isfinite().all(-1)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise FloatingPointError(
            f"in the drafter: its token of place {int(places[row, column])} is not finite. Check its weights, or run "
            "it in float32 or bfloat16 if it overflows in float16."
        )
