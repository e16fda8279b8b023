"""What a request to an engine says beside its prompt: seed, law, and its part in a guided pair."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from visual_spec.models.core.settings import LAW_SETTINGS, SEED, whole
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import draw_keys

CONDITIONAL: Final = "conditional"
UNCONDITIONAL: Final = "unconditional"
NAMES = ("seed", "role", "pair", *LAW_SETTINGS)


@dataclass(frozen=True)
class PictureRequest:
    """One request: a picture, or one of the two members of a guided one.

    Attributes:
        seed: of the noise, as of `torch.Generator().manual_seed(seed)`.
        law: how logits become the law of a token; of a pair, the conditional member's counts.
        role: "conditional", or "unconditional" for the member whose prompt guidance leads away from.
        pair: the name that both members of a guided picture share, and nobody else; None without guidance.
    """

    seed: int
    law: TokenLaw
    role: str = CONDITIONAL
    pair: str | None = None

    def key(self, number: int = 0) -> int:
        """Return the key of the noise of a grid: one generator gives the keys of all grids, in their order."""
        return _keys(self.seed, number + 1)[number]

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Self | None:
        """Return the request that says `settings`, the `extra_args` of an engine; None without a seed: not for us.

        Settings: `seed`; `role` and `pair`; and of the law `guidance_scale`, `temperature`, `top_k`, `top_p`,
        `guidance_until`, as in `TokenLaw`.

        Raises:
            ValueError: a name is unknown, or a value is not allowed; guidance without a pair, or the reverse.
        """
        if not settings or "seed" not in settings:
            return None
        if unknown := [name for name in settings if name not in NAMES]:
            raise ValueError(f"{', '.join(unknown)} given beside a seed; a picture takes {', '.join(NAMES)}.")
        seed, role, pair = settings["seed"], settings.get("role", CONDITIONAL), settings.get("pair")
        seed = whole("seed", seed, SEED)
        if role not in (CONDITIONAL, UNCONDITIONAL):
            raise ValueError(f"role={role!r}; pass {CONDITIONAL!r} or {UNCONDITIONAL!r}.")
        law = TokenLaw(**{name: settings[name] for name in LAW_SETTINGS if name in settings})
        if (pair is not None) != law.guided or (pair is not None and not isinstance(pair, str)):
            raise ValueError(
                f"pair={pair!r} with guidance_scale={law.guidance_scale}; above 1 two requests draw a picture, and "
                "both name the pair by one string. At 1 or below there is no pair."
            )
        return cls(seed, law, role, pair)


@functools.lru_cache(maxsize=4096)
def _keys(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(draw_keys([generator], 1)) for _ in range(count)]


def settings_of(law: TokenLaw, seed: int, pair: str | None = None) -> list[dict[str, Any]]:
    """Return the settings of the requests of a picture: one, or with guidance the conditional and the other.

    Args:
        pair: a name that no other picture in the engine has; with guidance only.

    Raises:
        ValueError: the law has more than a request can say: allowed ids, a history, or an end.
    """
    own = {name: getattr(law, name) for name in LAW_SETTINGS}
    if TokenLaw(**own) != law:
        raise ValueError(
            f"allowed={law.allowed}, history={law.history!r} and end={law.end!r} cannot be said in a request to an "
            f"engine, which takes {', '.join(LAW_SETTINGS)}; leave them out."
        )
    own = {name: value for name, value in own.items() if value is not None} | {"seed": seed}
    if not law.guided:
        return [own]
    return [own | {"pair": pair, "role": role} for role in (CONDITIONAL, UNCONDITIONAL)]
