"""Networks that come as TorchScript programs.

A TorchScript file is a program, not weights: it runs when it is loaded and when it is called, and it may read and write
files as the user may. So one is run only where the user trusts it (`--trust-program`).
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class VideoProgram:
    """A TorchScript network of videos.

    Args:
        path: the file. It takes float [B, 3, T, H, W] of 0 to 255, and `rescale`, `resize` and `return_features`.
        device: where it runs.

    Raises:
        ValueError: no TorchScript file, or one that fails while it is loaded.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device, self.checksum = path, device, checksum(path)
        self._size: int | None = None
        try:
            # FVD's file is TorchScript
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                self._network = torch.jit.load(path, map_location=device).eval().float()
        except Exception as error:  # the reader raises anything, and so does the program
            raise self._refusal("is no TorchScript file, or fails when it is loaded", error) from error

    @torch.no_grad()
    def __call__(self, videos: np.ndarray) -> Tensor:
        """Features float [B, D] of videos uint8 [B, T, H, W, 3].

        Raises:
            ValueError: the program failed, or returned something else; names the file.
        """
        inputs = torch.from_numpy(videos).permute(0, 4, 1, 2, 3).float().to(self.device)
        try:
            output = self._network(inputs, rescale=True, resize=True, return_features=True)
        except Exception as error:
            raise self._refusal("failed", error) from error
        if not isinstance(output, Tensor):
            raise self._refusal(f"returned a {type(output).__name__}, not a tensor")
        features = output.float().cpu()
        size = self._size or (features.shape[1] if features.ndim == 2 else 0)
        if features.shape != (len(videos), size) or not size:
            raise self._refusal(
                f"returned {list(features.shape)} for {len(videos)} videos, not [{len(videos)}, {size or 'features'}]"
            )
        if not features.isfinite().all():
            raise self._refusal("returned nan or infinity")
        self._size = size
        return features

    def _refusal(self, what: str, error: Exception | None = None) -> ValueError:
        # TorchScript puts what was raised into the last line.
        reason = "" if error is None else " ".join(str(error).strip().rpartition("\n")[2].split())[:200]
        told = f" ({reason or type(error).__name__})" if error is not None else ""
        return ValueError(
            f"the program {self.path} {what}{told}; pass i3d_torchscript.pt as its authors release it"
        )


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
