"""Seeded damage to bytes, JSON files and weights."""

import copy
import json
import struct
from random import Random
from typing import Any

WRONG_VALUES: tuple[Any, ...] = (
    None, [], {}, "", "x", "1", "../../x", -1, 0, 1.5, -(10**9), 10**12, 10**40, True, False, [1], ["x"], [[]], [None],
    {"a": 1}, 1e308, float("nan"), float("inf"), "\x00", "a" * 5000, [10**9] * 3,
)  # fmt: skip


def damaged_bytes(whole: bytes, rng: Random) -> tuple[bytes, str]:
    """The bytes with one kind of damage, and its name."""
    if not whole:
        return b"\x00", "a byte added"
    place, size = rng.randrange(len(whole)), min(rng.choice((1, 2, 8, 64, 512)), len(whole))
    kind = rng.choice(("flip", "cut", "drop", "insert", "zero", "repeat", "swap", "noise", "tail"))
    data = bytearray(whole)
    if kind == "flip":
        for _ in range(size):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "drop":
        del data[place : place + size]
    elif kind == "insert":
        data[place:place] = rng.randbytes(size)
    elif kind == "zero":
        data[place : place + size] = bytes(len(data[place : place + size]))
    elif kind == "repeat":
        data[place:place] = data[place : place + size]
    elif kind == "swap":
        other = rng.randrange(len(data))
        data[place], data[other] = data[other], data[place]
    elif kind == "noise":
        data[place : place + size] = rng.randbytes(len(data[place : place + size]))
    else:
        data += rng.randbytes(size)
    return bytes(data), f"{kind} {size} at {place} of {len(whole)}"


def damaged_settings(settings: dict[str, Any], rng: Random) -> tuple[dict[str, Any], str, str]:
    """Settings with one wrong value; what was done, and the setting."""
    changed = copy.deepcopy(settings)
    name = rng.choice(sorted(changed))
    if rng.random() < 0.1:
        del changed[name]
        return changed, f"without {name}", name
    value = copy.deepcopy(rng.choice(WRONG_VALUES))
    if isinstance(changed[name], list) and changed[name] and rng.random() < 0.4:
        changed[name][rng.randrange(len(changed[name]))] = value
        return changed, f"{name}[.]={value!r}"[:80], name
    changed[name] = value
    return changed, f"{name}={value!r}"[:80], name


def damaged_header(whole: bytes, rng: Random) -> tuple[bytes, str]:
    """A safetensors file with a header that says something else."""
    (size,) = struct.unpack("<Q", whole[:8])
    header, values = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    keys = [key for key in header if key != "__metadata__"]
    key = rng.choice(keys)
    entry = header[key]
    kind = rng.choice(
        ("dtype", "shape", "offsets", "gone", "renamed", "twice", "value", "length", "metadata")
    )
    if kind == "dtype":
        entry["dtype"] = rng.choice(("F16", "I64", "BOOL", "U8", "F8_E4M3", "X", 3, None, "F64"))
    elif kind == "shape":
        entry["shape"] = rng.choice(
            ([], [0], [-1], [2**62], entry["shape"] + [1], entry["shape"] + [2], "x", [1.5])
        )
    elif kind == "offsets":
        first, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            ([first, end + 8], [end, first], [-1, end], [0, 2**60], [first], None)
        )
    elif kind == "gone":
        del header[key]
    elif kind == "renamed":
        header[rng.choice(("other", "", "\x00", key + ".x", "a" * 3000))] = header.pop(key)
    elif kind == "twice":
        header[key + "_again"] = copy.deepcopy(entry)
    elif kind == "value":
        header[key] = rng.choice((None, [], "x", 3, {}))
    elif kind == "metadata":
        header["__metadata__"] = rng.choice(({"format": 3}, [], "x", {"format": "tf"}, {"a": {"b": 1}}))
    text = json.dumps(header).encode()
    length = len(text) if kind != "length" else rng.choice((0, 1, 2**63, 2**40, len(text) - 1, len(text) + 1))
    return struct.pack("<Q", length) + text + values, f"{kind} of {key}"[:80]
