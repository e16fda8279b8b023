"""Settings of samplers, as the tests write them down."""

from typing import Any

from visual_spec.samplers.core.checks import COUPLINGS

# Couplings of a Jacobi window with the acceptance that goes with each.
EXACT = [(coupling, "exact") for coupling in COUPLINGS]
COMBINATIONS = [("gumbel", "identical"), *EXACT]


def lossy(acceptance: str, **numbers: Any) -> dict[str, Any]:
    """A relaxed acceptance with its numbers."""
    return {"acceptance": acceptance, "relaxation": numbers}


def settings_of(sampler: Any) -> dict[str, Any]:
    """What a sampler was made with, without what diffusers notes about the class."""
    return {name: value for name, value in sampler.config.items() if not name.startswith("_")}
