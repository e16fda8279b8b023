"""Networks that come as TorchScript programs, run in a process of their own.

A TorchScript file is a program, not weights: it runs when it is loaded and when it is called, and it may read and write
files as the user may. The process is no prison. It keeps a program that never ends, or that ends Python, from taking
its caller along: one that does not answer in time is stopped.

    python -P -m visual_spec.eval.quality.programs FILE DEVICE THREADS DESCRIPTOR      (the process itself)
"""

from __future__ import annotations

import hashlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

START_SECONDS = 300.0  # to start Python and to load the file
VIDEO_SECONDS = 60.0  # for the first video, and 2 s more a frame
_MOST_BYTES = 2**31  # of an answer
_FAILED, _FEATURES = b"!", b"="


class VideoProgram:
    """A TorchScript network of videos, in its own process.

    Args:
        path: the file. It takes float [B, 3, T, H, W] of 0 to 255, and `rescale`, `resize` and `return_features`.
        device: where it runs.

    Raises:
        ValueError: no TorchScript file, or one that fails or does not end while it is loaded.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.checksum = path, checksum(path)
        self._seconds = self._size = None
        ours, theirs = socket.socketpair()
        arguments = [str(path), device, str(torch.get_num_threads()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._line = Connection(ours.detach())
        self._stop = weakref.finalize(self, _stop, self._process, self._line)
        self._answer(START_SECONDS, "was not loaded")

    def __call__(self, videos: np.ndarray) -> Tensor:
        """Features float [B, D] of videos uint8 [B, T, H, W, 3].

        Raises:
            ValueError: the program failed, did not answer in time, or returned something else; names the file.
        """
        if self._seconds is None:  # one video tells how long others may take
            started = time.monotonic()
            self._features(videos[:1], VIDEO_SECONDS + 2 * videos.shape[1])
            self._seconds = time.monotonic() - started
        return self._features(videos, VIDEO_SECONDS + 10 * len(videos) * self._seconds)

    def _features(self, videos: np.ndarray, seconds: float) -> Tensor:
        buffer = io.BytesIO()
        np.save(buffer, videos)
        try:
            self._line.send_bytes(buffer.getvalue())
        except OSError:
            raise self._refusal("ended its process") from None
        features = np.load(io.BytesIO(self._answer(seconds, "did not answer")), allow_pickle=False)
        size = self._size or (features.shape[1] if features.ndim == 2 else 0)
        if features.shape != (len(videos), size) or not size or features.dtype != np.float32:
            raise self._refusal(
                f"returned {features.dtype} {list(features.shape)} for {len(videos)} videos, not float32 "
                f"[{len(videos)}, {size or 'features'}]"
            )
        if not np.isfinite(features).all():
            raise self._refusal("returned nan or infinity")
        self._size = size
        return torch.from_numpy(features)

    def _answer(self, seconds: float, late: str) -> bytes:
        if not self._line.poll(seconds):
            raise self._refusal(f"{late} within {seconds:.0f} s, and was stopped")
        try:
            answer = self._line.recv_bytes(_MOST_BYTES)
        except (EOFError, OSError):
            raise self._refusal("ended its process") from None
        if answer[:1] == _FAILED:
            raise self._refusal(answer[1:].decode(errors="replace"))
        return answer[1:]

    def _refusal(self, what: str) -> ValueError:
        self._stop()
        return ValueError(
            f"the program {self.path} {what}; pass i3d_torchscript.pt as its authors release it"
        )


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stop(process: subprocess.Popen, line: Connection) -> None:
    line.close()
    process.kill()
    process.wait()


# -- in the process of the program -------------------------------------------------------------------------------------


def main(path: str, device: str, threads: int, descriptor: int) -> None:
    """Load the program, then answer videos with features until the other end closes."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(threads)
    line = Connection(descriptor)
    try:
        network: Any = torch.jit.load(path, map_location=device).eval().float()
    except Exception as error:  # the reader raises anything, and so does the program
        line.send_bytes(
            _FAILED + f"is no TorchScript file, or fails when it is loaded ({_reason(error)})".encode()
        )
        return
    line.send_bytes(_FEATURES)
    with torch.no_grad():
        while True:
            try:
                videos = torch.from_numpy(np.load(io.BytesIO(line.recv_bytes()), allow_pickle=False))
            except EOFError:
                return
            line.send_bytes(_answered(network, videos, device))


def _answered(network: Any, videos: Tensor, device: str) -> bytes:
    inputs = videos.permute(0, 4, 1, 2, 3).float().to(device)  # [B, 3, T, H, W]
    try:
        output = network(inputs, rescale=True, resize=True, return_features=True)
        if not isinstance(output, Tensor):
            return _FAILED + f"returned a {type(output).__name__}, not a tensor".encode()
        buffer = io.BytesIO()
        np.save(buffer, output.float().cpu().numpy(), allow_pickle=False)
    except Exception as error:
        return _FAILED + f"failed ({_reason(error)})".encode()
    return _FEATURES + buffer.getvalue()


def _reason(error: Exception) -> str:
    """The last line of an error: TorchScript puts what was raised there."""
    return " ".join(str(error).strip().rpartition("\n")[2].split())[:200] or type(error).__name__


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, whatever the program does."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
