"""What the host may learn of a decode without stalling the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Brings a small tensor to the host; on CUDA one call late, because asking at once would stall the device."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, value: Tensor) -> Tensor | None:
        """The value; on CUDA that of the call before, and None at the first call."""
        if value.device.type != "cuda":
            return value
        earlier = self._pending
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(value.device))
        self._pending = (host, event)
        if earlier is None:
            return None
        earlier[1].synchronize()
        return earlier[0]
