"""VGGish (Hershey et al. 2017), the network of the Frechet audio distance of papers (Kilgour et al. 2019).

As Google's program cuts clips, which MusicGen and MAGNeT call: a clip is scaled to a peak of 1, and every second of it
gives one embedding, with a new second every half. The embedding is what the last layer returns, without a ReLU, PCA or
rounding to 8 bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from visual_spec.models.core.checkpoints import fill, read_checkpoint

SAMPLE_RATE = 16_000  # Hz
SECOND, STEP = SAMPLE_RATE, SAMPLE_RATE // 2  # samples that one embedding hears, and from one to the next
EMBEDDING_SIZE = 128
FRAMES, BANDS = 96, 64  # of a spectrogram; the two last frames of a second are left out
_WINDOW, _HOP, _FOURIER = 400, 160, 512  # samples of a spectrum, from one to the next, and with zeros added
# Google's program reads samples of 16 bits as whole numbers, and divides by 0.1 at least
_LEAST_PEAK = 0.1 / 32768


class VGGish(nn.Module):
    """Embeddings of seconds of sound. The names of its weights are torchvggish's."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for block in ((64,), (128,), (256, 256), (512, 512)):
            for width in block:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        size = channels * (FRAMES // 16) * (BANDS // 16)
        self.embeddings = nn.Sequential(
            nn.Linear(size, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, EMBEDDING_SIZE),
        )

    def forward(self, spectrograms: Tensor) -> Tensor:
        """Embeddings [N, 128] of log mel spectrograms [N, 96, 64]."""
        maps = self.features(spectrograms[:, None])  # [N, 512, 6, 4]
        return self.embeddings(maps.permute(0, 2, 3, 1).flatten(1))  # channels last, as TensorFlow has them


def load_vggish(path: str | Path) -> VGGish:
    """The network with the weights of a file, fixed.

    Args:
        path: `vggish-10086976.pth` of torchvggish. Weights of its PCA (`pproc`) are left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that holds more than tensors, or other weights.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no VGGish weights at {path}; pass vggish-10086976.pth of torchvggish")
    weights = read_checkpoint(path).weights
    weights = {key: value for key, value in weights.items() if not key.startswith("pproc.")}
    with torch.device("meta"):
        network = VGGish()
    return fill(network, weights, str(path), what="VGGish", dtype=torch.float32).eval().requires_grad_(False)


def spectrograms(clip: Tensor) -> Tensor:
    """Log mel spectrograms float32 [W, 96, 64] of the seconds of a clip [samples] at 16 kHz; none of a shorter clip."""
    if len(clip) < SECOND:
        return torch.zeros(0, FRAMES, BANDS)
    clip = clip.double() / clip.max().double().clamp_min(_LEAST_PEAK)
    frames = clip.unfold(0, SECOND, STEP).unfold(1, _WINDOW, _HOP)[:, :FRAMES]  # [W, 96, 400]
    spectra = torch.fft.rfft(frames * torch.hann_window(_WINDOW, dtype=torch.float64), _FOURIER).abs()
    return (spectra @ _mel_filters() + 0.01).log().float()


def _mel_filters() -> Tensor:
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(
        _FOURIER // 2 + 1, BANDS, 125.0, 7500.0, SAMPLE_RATE, None, "htk", triangularize_in_mel_space=True
    )
    return torch.from_numpy(filters).double()  # [257, 64]
