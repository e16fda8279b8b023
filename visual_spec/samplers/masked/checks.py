"""What a masked sampler refuses before any compute."""

from __future__ import annotations

from typing import Any

from visual_spec.models.core.masked_protocol import MaskedModel, Rescorer
from visual_spec.samplers.core.checks import check_allowed
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.policies import Ranking


def check_masked_model(model: Any, law: TokenLaw) -> None:
    """Refuse, before any compute, a request that no sampler of masked models can decode."""
    if hasattr(model, "write"):
        raise ValueError(
            f"{type(model).__name__} fills in one frame after the other; use FrameMaskedSampler for such models."
        )
    if not (hasattr(model, "mask_id") and hasattr(model, "prepare")):
        raise ValueError(
            f"{type(model).__name__} hides no tokens; this sampler decodes masked models, such as MagnetModel. Use "
            "AutoregressiveSampler or ColumnAutoregressiveSampler."
        )
    _check_masked_request(model, law)


def check_frame_model(model: Any, law: TokenLaw) -> None:
    """Refuse, before any compute, a request that cannot be decoded frame by frame."""
    if not (hasattr(model, "mask_id") and hasattr(model, "write")):
        raise ValueError(
            f"{type(model).__name__} does not fill in frames; this sampler decodes a FrameModel, such as "
            "FrameMaskedTransformer."
        )
    _check_masked_request(model, law)


def _check_masked_request(model: Any, law: TokenLaw) -> None:
    check_allowed(law, model.vocab_size)
    if law.guidance_until is not None:
        raise ValueError(
            f"guidance_until={law.guidance_until}, but masked decoding knows no order of slots; pass "
            "guidance_until=None, and guidance='falling' or 'rising' to the sampler."
        )


def check_rescorer(model: MaskedModel, rescorer: Rescorer, ranking: Ranking) -> None:
    """Refuse a rescorer of other codes or clips, and scores that are no probabilities."""
    if rescorer.vocab_size != model.vocab_size:
        raise ValueError(
            f"the rescorer knows {rescorer.vocab_size} codes, and the model {model.vocab_size}; pass two models of the "
            "same codec."
        )
    if rescorer.num_frames != model.grid.num_tokens:
        raise ValueError(
            f"the rescorer is made for clips of {rescorer.num_frames} frames, and the model for "
            f"{model.grid.num_tokens}; pass one for as many frames."
        )
    if ranking.second_draw:
        raise ValueError("second_draw=True with a rescorer, which ranks the draws themselves; leave one out.")
    if not ranking.of_draws:
        raise ValueError(
            f"score={ranking.score!r} asks for no probability of a draw, so there is nothing to rescore; pass "
            "score='log_probability' or 'probability', or no rescorer."
        )


def check_reuse(model: Any, settings: Any, parts: dict[str, Any]) -> None:
    """Refuse reuse by a model that keeps nothing, beside a rescorer, or without its network.

    `settings`: the configuration of a `MaskedSampler`.
    """
    if not settings.reuse:
        return
    if not hasattr(model, "scores"):
        raise ValueError(
            f"reuse={settings.reuse}, but a {type(model).__name__} keeps nothing of a call; pass reuse=0."
        )
    if parts.get("rescorer") is not None:
        raise ValueError(
            f"reuse={settings.reuse} with a rescorer, which scores the draws of every call; pass one of the two."
        )
    if settings.reuse_by == "shortcut":
        shortcut = parts.get("shortcut")
        if shortcut is None:
            raise ValueError(
                "reuse_by='shortcut' needs shortcut, a FeatureShortcut trained for this model (in a checkout: "
                "python scripts/train shortcut)."
            )
        shortcut.check_fits(model)


def check_in_order(model: Any) -> None:
    """Refuse a model that cannot be decoded in an order of tokens: of several codebooks, or one that reads the time."""
    if model.grid.codebooks != 1:
        raise ValueError(
            f"the model has {model.grid.codebooks} codebooks; this sampler decodes one. Use MaskedSampler."
        )
    if hasattr(model, "set_time"):
        raise ValueError(
            f"a {type(model).__name__} is told how far the decode is, which no order of tokens says; use MaskedSampler."
        )
