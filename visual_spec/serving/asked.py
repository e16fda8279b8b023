"""What a request for pictures says: its JSON read, checked field by field, and made orders."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from visual_spec.models.core.settings import LAW_DEFAULTS, Within, whole
from visual_spec.serving.answers import RefusedError
from visual_spec.serving.painter import Order, Painter

_FIELDS = (
    "prompt", "model", "n", "size", "seed", "response_format", "stream", "partial_images", "output_format", "user",
    *LAW_DEFAULTS,
)  # fmt: skip
# Fields of OpenAI's that change nothing here, with their defaults there, which are the only values that are taken.
_NEUTRAL = {
    "quality": ("auto", "standard"),
    "background": ("auto",),
    "moderation": ("auto",),
    "output_compression": (100,),
}
_MOST_PARTIAL = 3  # as OpenAI


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and all together.

    Attributes:
        body: bytes of a request.
        prompt: letters of a prompt.
        n: pictures of a request.
        queue: pictures that are accepted and not finished.
        seconds: from the first byte of a request to the last of its answer.
        read: seconds for a body to come in.
        step: seconds of a step of the engine; one that takes longer hangs.
    """

    body: int = 65536
    prompt: int = 2000
    n: int = 8
    queue: int = 64
    seconds: float = 600.0
    read: float = 30.0
    step: float = 300.0


def read(held: bytes, painter: Painter, limits: Limits) -> tuple[list[Order], bool]:
    """Return the orders of the body of a request, and whether to stream.

    Raises:
        RefusedError: names the field, its value and what is allowed.
    """
    try:
        asked = json.loads(held, object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        why = f": {error}".split(";")[0] if type(error) is ValueError else ""  # no advice of Python
        raise RefusedError(400, f"the body is no JSON{why}; send an object with a prompt.") from error
    if not isinstance(asked, dict):
        raise RefusedError(400, f"the body is a {type(asked).__name__}; send an object with a prompt.")
    body = {name: value for name, value in asked.items() if value is not None}
    for name, values in _NEUTRAL.items():
        _one_of(body, name, values)
    if unknown := sorted(set(body) - {*_FIELDS, *_NEUTRAL}):
        raise RefusedError(400, f"{unknown[0]} is unknown; pass {', '.join(_FIELDS)}.", unknown[0])
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or len(prompt) > limits.prompt:
        what = f"{len(prompt)} letters" if isinstance(prompt, str) else repr(prompt)[:80]
        raise RefusedError(
            400, f"prompt of {what}; pass a text of at most {limits.prompt} letters.", "prompt"
        )
    height, width = painter.size
    _one_of(body, "size", ("auto", f"{width}x{height}"))
    _one_of(body, "model", (painter.name,))
    _one_of(body, "response_format", ("b64_json",))
    _one_of(body, "output_format", ("png",))
    _one_of(body, "stream", (False, True))
    n, stream = _whole(body, "n", 1, 1, limits.n), body.get("stream", False)
    partial = _whole(body, "partial_images", 0, 0, _MOST_PARTIAL)
    if (stream and n > 1) or (partial and not stream):
        raise RefusedError(
            400, f"n={n}, partial_images={partial}, stream={stream}; a stream holds one picture.", "n"
        )
    first = _whole(body, "seed", random.SystemRandom().randrange(2**32), 0, 2**64 - n)
    for name in LAW_DEFAULTS:
        if isinstance(body.get(name), bool) or not isinstance(body.get(name, 0), int | float):
            raise RefusedError(400, f"{name}={body[name]!r}; pass a number.", name)
    try:
        law = painter.law(**{name: body.get(name) for name in LAW_DEFAULTS})
        orders = [Order(prompt, first + index, law, partial) for index in range(n)]
        painter.check(orders[0])
    except (ValueError, TypeError) as error:
        raise RefusedError(400, str(error)) from error
    return orders, stream


def _one_of(body: Mapping[str, object], name: str, allowed: tuple[object, ...]) -> None:
    value = body.get(name, allowed[0])
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise RefusedError(400, f"{name}={str(value)[:80]!r}; pass {' or '.join(map(repr, allowed))}.", name)


def _whole(body: Mapping[str, object], name: str, usual: int, least: int, most: int) -> int:
    value = body.get(name, usual)
    try:
        return whole(name, value, Within(least, most))
    except ValueError as error:
        raise RefusedError(400, str(error), name) from error


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these pairs; a name that is there twice has no value."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]} is there twice")
        found[name] = value
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")
