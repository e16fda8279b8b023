"""Triton's interpreter with bfloat16 as devices have it."""

from typing import Any

import numpy as np
import pytest
import torch


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to bfloat16 (the interpreter cuts), convert integers to it, and take products of it (of bits without this).

    The sum of a product's block is rounded once, so it does not depend on how NumPy's library takes a block of this
    shape; what is then added to the block is added in float32.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    real = interpreter.InterpreterBuilder.cast_impl

    def numbers(handle: Any) -> np.ndarray:
        kinds = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
        kind = kinds.get(handle.dtype.scalar)
        if kind is None:
            return handle.data
        bits = np.ascontiguousarray(handle.data)
        return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(kind).float().numpy()

    def cast(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == kind.scalar or tl.bfloat16 not in (source.dtype.scalar, kind.scalar):
            return real(self, source, kind)
        values = numbers(source).astype(np.float32)
        if kind.scalar == tl.bfloat16:
            values = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            values = values.astype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(values, kind.scalar)

    def dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        block = np.matmul(numbers(left).astype(np.float64), numbers(right).astype(np.float64))
        return interpreter.TensorHandle(block.astype(total.data.dtype) + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
