"""JSON that every reader takes: a number that is not finite is null, and what it is stands beside it.

    {"value": 0.5, "low": null, "high": null, "not_finite": {"low": "-inf", "high": "inf"}}

`files.reading.parse` gives back the numbers. Everything here that writes JSON does it by `json_text`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from visual_spec.files.reading import NOT_FINITE
from visual_spec.files.whole import write_atomically


def json_text(document: object, **layout: Any) -> str:
    """Return JSON without Infinity and NaN; `layout` as of `json.dumps`."""
    return json.dumps(_strict(document), allow_nan=False, **layout)


def write_json(path: Path, document: object, *, indent: int | None = None, overwrite: bool = True) -> None:
    """Write a JSON document whole; on one line and without blanks if `indent` is None."""
    separators = (",", ":") if indent is None else None
    text = json_text(document, indent=indent, separators=separators)
    write_atomically(path, text + "\n", overwrite=overwrite)


def _strict(value: object) -> object:
    if isinstance(value, dict):
        strict = {name: _strict(one) for name, one in value.items()}
        texts = {
            name: f"{one}" for name, one in value.items() if isinstance(one, float) and strict[name] is None
        }
        return strict | ({NOT_FINITE: texts} if texts else {})
    if isinstance(value, list | tuple):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
