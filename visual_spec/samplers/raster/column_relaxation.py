"""Relaxed acceptance for several codebooks, each with its own codes and so its own groups of similar sound.

The rules come from `relaxed`, one for each codebook, with the tables of its codes. Yanuka et al., "Principled
coarse-grained acceptance for speculative decoding in speech", 2025 (arXiv 2511.13732), relax the test for audio tokens
by groups of similar codes: a draft is kept as often as its group allows. They also replace a refused draft through the
groups, which may overlap. Here `relaxed` replaces it, at a cost that the divergence meter can measure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import EXACT, AcceptanceRule, Relaxation
from visual_spec.samplers.core.relaxed import rule_of


def check_codebooks(relaxation: Relaxation, codebook: Tensor | None, codebooks: int, vocab_size: int) -> None:
    """Refuse, before any compute, codebooks that do not fit the model. `codebook`: [K, V, D] or None.

    Raises:
        ValueError: required codebooks are missing, have another shape, or have fewer codes than the settings need.
    """
    if codebook is None or not relaxation.needs_codebook:
        relaxation.check(codebook, vocab_size)
    elif codebook.dim() != 3 or len(codebook) != codebooks:
        raise ValueError(
            f"codebook of shape {tuple(codebook.shape)} for a model of {codebooks} codebooks; pass the codes of each, "
            f"[{codebooks}, {vocab_size}, D]."
        )
    else:
        relaxation.check(codebook[0], vocab_size)


def rule_by_codebook(
    relaxation: Relaxation, codebook: Tensor | None, codebooks: int, device: torch.device
) -> AcceptanceRule:
    """Return the rule with its tables, for windows of N * K entries, column by column."""
    if relaxation.lossless:
        return EXACT
    return join_rules(
        [rule_of(relaxation, None if codebook is None else codebook[k], device) for k in range(codebooks)]
    )


def join_rules(rules: Sequence[AcceptanceRule]) -> AcceptanceRule:
    """Join one rule for each codebook to one for windows of N * K entries; entry i belongs to codebook i % K."""

    def by_codebook(calls: Sequence[Callable[..., Tensor]], *window: Tensor) -> Tensor:
        count = len(calls)
        answers = [call(*(part[:, k::count] for part in window)) for k, call in enumerate(calls)]
        return torch.stack(answers, 2).flatten(1, 2)

    return AcceptanceRule(
        lambda *window: by_codebook([rule.probability for rule in rules], *window),
        lambda *window: by_codebook([rule.refused_target for rule in rules], *window),
        lossless=all(rule.lossless for rule in rules),
    )
