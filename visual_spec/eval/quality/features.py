"""What measures how far two sets of pictures or of clips are apart: networks, and statistics of spectra."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from visual_spec.data.waves import levels
from visual_spec.models.shapes_features import ShapesFeatures
from visual_spec.pipelines.embedded import embedded_folder, missing_models

_WINDOW = 1024  # samples of a spectrum, and so 64 mel bands
# What is quieter, in dB of a full-scale sine, counts as silence: with a lower floor the hiss that a codec leaves in
# empty bands outweighs the music.
_SILENCE = -60.0
INCEPTION_FILE = "weights-inception-2015-12-05-6726825d.pth"  # as torch-fidelity releases and caches it


def load_shapes_features(folder: str | Path | None = None) -> ShapesFeatures:
    """The classifier of `shapes` pictures, in single precision, its weights fixed.

    Args:
        folder: written by `save_pretrained` (default: the embedded one).

    Raises:
        FileNotFoundError: no folder is given, and the embedded models are not installed.
    """
    if folder is None:
        if missing := missing_models():
            raise FileNotFoundError(f"no classifier of shapes: {missing}")
        folder = embedded_folder("shapes_features")
    network = ShapesFeatures.from_pretrained(folder, torch_dtype=torch.float32)
    return network.eval().requires_grad_(False)


def find_inception() -> Path | None:
    """Return where PyTorch's cache keeps the Inception weights of torch-fidelity, if it does. Downloads nothing."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    return path if path.exists() else None


class MelStatistics(nn.Module):
    """Statistics of a clip's log mel spectrogram: no network, nothing to download, the same on every machine.

    The spectrogram has 64 bands in dB from spectra of 1024 samples, a quarter apart; what lies more than 60 dB below a
    full-scale sine counts as silence. A clip is described by the mean and the standard deviation of each band over
    time, 128 numbers in dB. They tell timbre, register, loudness and how lively a clip is, but not its order: whether
    notes make the melody that was asked for is what the parser hears.

    Args:
        sampling_rate: of the clips, in Hz.
    """

    num_features = 2 * _WINDOW // 16
    sampling_rate: Tensor

    def __init__(self, sampling_rate: int) -> None:
        super().__init__()
        # In the state: features of other rates are features of another judge.
        self.register_buffer("sampling_rate", torch.tensor(sampling_rate))

    def forward(self, clips: Tensor) -> Tensor:
        """Features float32 [B, 128] of clips [B, samples]."""
        bands = levels(clips.double(), _WINDOW, int(self.sampling_rate))  # [B, 64, frames]
        bands = bands.clamp_min(_SILENCE)
        return torch.cat([bands.mean(-1), bands.std(-1, correction=0)], -1).float()


class FrameStatistics(nn.Module):
    """Features of a clip: the mean over its frames' features, and their mean change from frame to frame.

    The mean tells what the frames show, the change how much moves. The order of frames counts only through it; whether
    the motion is the one that was asked for is what the parser reads.

    Args:
        network: maps uint8 pictures [B, 3, H, W] to features [B, D].
    """

    def __init__(self, network: ShapesFeatures) -> None:
        super().__init__()
        self.network, self.num_features = network, 2 * network.num_features

    def forward(self, clips: Tensor) -> Tensor:
        """Features float32 [B, 2 D] of uint8 clips [B, T, H, W, 3]."""
        frames = clips.flatten(0, 1).permute(0, 3, 1, 2)
        features = self.network(frames).float().unflatten(0, clips.shape[:2])  # [B, T, D]
        return torch.cat([features.mean(1), features.diff(dim=1).abs().mean(1)], -1)


@torch.no_grad()
def features_of(network: nn.Module, pictures: np.ndarray, *, chunk: int = 50) -> Tensor:
    """Features float32 [N, D] on the CPU of pictures uint8 [N, H, W, 3], or of clips float32 [N, samples]."""
    device = next(iter(network.state_dict().values())).device
    parts = []
    for start in range(0, len(pictures), chunk):
        part = torch.from_numpy(np.ascontiguousarray(pictures[start : start + chunk]))
        part = part.permute(0, 3, 1, 2) if part.ndim == 4 else part
        parts.append(network(part.to(device)).float().cpu())
    return torch.cat(parts)
