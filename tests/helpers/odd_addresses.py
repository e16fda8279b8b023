"""Files whose weights stand at odd addresses when they are mapped, as any writer of safetensors may leave them."""

import struct
from pathlib import Path
from typing import Any

from torch import nn

ODD = 40  # bytes after a multiple of 64


def put_at_odd_addresses(folder: Path) -> int:
    """Lengthen the header of every safetensors file below a folder, and return their number."""
    paths = sorted(folder.rglob("*.safetensors"))
    for path in paths:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        more = (ODD - 8 - length) % 64  # spaces after the JSON are part of the format
        header = struct.pack("<Q", length + more) + content[8 : 8 + length] + b" " * more
        path.write_bytes(header + content[8 + length :])
    return len(paths)


def misplaced(*models: Any) -> list[str]:
    """The weights of models that do not begin at a multiple of 64 bytes; those without values are no weights."""
    return [
        name
        for model in models
        if isinstance(model, nn.Module)
        for name, value in [*model.named_parameters(), *model.named_buffers()]
        if value.numel() and value.data_ptr() % 64
    ]
