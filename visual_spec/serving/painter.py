"""What the endpoint calls: an order for a picture, and who draws it."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from visual_spec.samplers.core.law import TokenLaw

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Order:
    """One picture.

    Attributes:
        prompt: a caption.
        seed: of its noise: the same picture for the same seed, wherever it is drawn.
        law: how logits become the law of a token.
        partial: pictures to show on the way, with the tokens that there are.
    """

    prompt: str
    seed: int
    law: TokenLaw
    partial: int = 0


@dataclass(frozen=True)
class Drawn:
    """A picture, or a partial one.

    Attributes:
        png: the file.
        whole: whether it is the picture.
        facts: what it cost, such as {"calls": 41, "tokens": 256}, and "drafts" that were tested, where they are known.
    """

    png: bytes
    whole: bool = True
    facts: dict[str, int] = field(default_factory=dict)


class BusyError(Exception):
    """No more orders are taken now."""


class BrokenError(Exception):
    """Nothing is drawn any more."""


class Painter(Protocol):
    """Draws orders. It says how many it takes, and refuses more by `BusyError`.

    One whose engine can break also has `fault(step: float) -> str | None`: why nothing is drawn any more, such as a
    step that takes more than `step` seconds; None: all is well. Once it has said why, it is not used again.
    """

    name: str
    size: tuple[int, int]  # height and width in pixels

    def law(self, **settings: Any) -> TokenLaw:
        """Return the law of a token; None is the default of the model. Raises ValueError for what is out of range."""
        ...

    def check(self, order: Order) -> None:
        """Refuse, before any compute, what cannot be drawn. Raises ValueError."""
        ...

    def draw(self, order: Order) -> AsyncGenerator[Drawn, None]:
        """Yield partial pictures, then the picture. If the iterator is closed before, the order is given up."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


def png_of(image: Image) -> bytes:
    """Return the file of a PIL image."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
