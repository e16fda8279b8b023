"""Codebooks that follow their vectors by exponential averages (van den Oord et al. 2017, appendix A.1)."""

from __future__ import annotations

import torch
from torch import Tensor


class CodeAverages:
    """Running sums whose quotients are the codes of a codebook `[V, D]`."""

    def __init__(self, codes: Tensor) -> None:
        self.count = torch.ones(len(codes), device=codes.device)
        self.total = codes.detach().clone()
        self.idle = torch.zeros(len(codes), device=codes.device)

    def restart(self, codes: Tensor) -> None:
        """Start again with other codes."""
        self.load_state_dict(CodeAverages(codes).state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        return {"count": self.count, "total": self.total, "idle": self.idle}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        for name, value in self.state_dict().items():
            value.copy_(saved[name])

    @torch.no_grad()
    def follow(self, codes: Tensor, vectors: Tensor, ids: Tensor, decay: float) -> None:
        """Move each code towards the mean of the vectors `[N, D]` that are coded by it; `ids` `[N]` are their codes."""
        count = torch.zeros_like(self.count).index_add_(0, ids, torch.ones_like(ids, dtype=self.count.dtype))
        total = torch.zeros_like(self.total).index_add_(0, ids, vectors)
        self.count.mul_(decay).add_(count, alpha=1 - decay)
        self.total.mul_(decay).add_(total, alpha=1 - decay)
        # An unused code stays; its sums fade until dividing them would give noise.
        known = self.count > 1e-6
        codes[known] = self.total[known] / self.count[known, None]
        self.idle.add_(1).mul_(count == 0)

    @torch.no_grad()
    def revive(self, codes: Tensor, vectors: Tensor, ids: Tensor, idle_steps: int, noise: Tensor) -> None:
        """Move codes that were idle for longer than `idle_steps` onto at most 64 vectors, drawn by squared error;
        `noise` `[N]` is uniform."""
        idle = (self.idle > idle_steps).nonzero()[:64, 0]
        # The smallest exponential race times are draws without replacement.
        error = (vectors - codes[ids]).square().sum(-1).clamp_min(1e-8)
        chosen = (-noise.clamp_min(1e-20).log() / error).argsort()[: len(idle)]
        idle = idle[: len(chosen)]
        codes[idle] = vectors[chosen]
        self.total[idle] = vectors[chosen]
        self.count[idle] = 1.0
        self.idle[idle] = 0.0
