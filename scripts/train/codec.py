"""Train the embedded codec, a small EnCodec, on `tunes`.

transformers' `EncodecModel` cannot be trained: its quantiser gives no gradient and its codebooks are zeros. This module
adds the residual quantiser of SoundStream and EnCodec (Zeghidour et al. 2021, section III-C; Defossez et al. 2022,
section 3.2), with straight-through gradients and a commitment loss. Codebooks follow their vectors by exponential
averages, and unused codes are moved onto badly coded vectors. The codebooks are the model's own, so the
result is a plain `EncodecModel`.

The losses are EnCodec's without its discriminators: mel spectrograms in several resolutions, and the absolute error of
the wave. The latter is relative to the wave's level and weighs more here, since tunes repeat the same waves.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import EncodecConfig, EncodecModel
from transformers.audio_utils import hertz_to_mel, mel_filter_bank, mel_to_hertz

from scripts.train.codebook import CodeAverages
from scripts.train.waves import si_sdr, spectral_distance
from visual_spec.data.tunes import FRAME, NUM_FRAMES, SAMPLE_RATE
from visual_spec.data.tunes_parser import score
from visual_spec.data.tunes_synth import sample_dataset
from visual_spec.eval.quality.accuracy import summarise
from visual_spec.models.columns.encodec import decode_codes, encode_waves
from visual_spec.models.core.kmeans import k_means
from visual_spec.models.core.settings import Count, Share, Within, read_fields
from visual_spec.training.loop import Descent, RunOptions, Trainer, print_record, read_options

_WINDOWS = (128, 256, 512, 1024, 2048)  # samples, 8 to 128 ms
_FLOOR = 3e-4  # amplitude, about -70 dB: quieter partials do not count


@dataclass(frozen=True)
class CodecTraining:
    """Settings of a run.

    `crop` is in frames. The last `whole_clips` of the steps use whole clips, with as many samples a step. The first
    `continuous_steps` train an autoencoder without codes. From then until `revive_until` of the steps, a code that was
    not used for `idle_steps` is moved. With probability `quantiser_dropout` a step uses only the first codebooks, 1 to
    K of them. `bfloat16` computes the two networks in bfloat16, but never the codes or the losses.
    """

    steps: Count = 12000
    batch_size: Count = 16
    crop: Annotated[int, Within(1, NUM_FRAMES)] = 50
    whole_clips: Share = 0.1
    continuous_steps: int = 1000
    learning_rate: float = 1e-3
    wave_weight: float = 3.0
    spectral_weight: float = 1.0
    commitment: float = 0.25
    average_decay: float = 0.99
    idle_steps: int = 150
    revive_until: Share = 0.7
    quantiser_dropout: Share = 0.0
    clips: Count = 3000
    held_out_clips: Count = 100
    bfloat16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        read_fields(self)


def codec_config(
    num_filters: int = 16, hidden_size: int = 64, codebook_size: int = 512, num_codebooks: int = 4
) -> EncodecConfig:
    """Return the configuration of an EnCodec for `tunes`: 16 kHz, 50 frames a second.

    Like MusicGen's 32 kHz codec it is not causal: a frame's samples are around the middle of its receptive field.

    Args:
        num_filters: channels at the sampling rate; they double with every reduction of the rate.
        hidden_size: dimension of a latent.
        codebook_size: a power of two.
    """
    kilobits = num_codebooks * math.log2(codebook_size) * SAMPLE_RATE / FRAME / 1000
    return EncodecConfig(
        target_bandwidths=[kilobits],
        sampling_rate=SAMPLE_RATE,
        hidden_size=hidden_size,
        num_filters=num_filters,
        upsampling_ratios=[8, 5, 4, 2],
        num_lstm_layers=1,
        use_causal_conv=False,
        use_conv_shortcut=False,
        codebook_size=codebook_size,
    )


@torch.no_grad()
def initialise(model: EncodecModel) -> None:
    """Initialise the convolutions so that they keep the variance of their input, without offsets.

    PyTorch's default loses two thirds of it in every layer, so the latents of a fresh model hardly change over time. A
    model of six filters then learned nothing in 45 steps (loss 5.4 to 5.4); from this start the loss fell from 7.2 to
    4.85.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
            # Every output of a transposed convolution sums over only kernel / stride places.
            places = layer.kernel_size[0] / (layer.stride[0] if isinstance(layer, nn.ConvTranspose1d) else 1)
            deviation = layer.weight.std() * (layer.in_channels * places) ** 0.5
            scale: Any = layer.parametrizations.weight.original0  # pyright: ignore[reportAttributeAccessIssue]
            scale.div_(deviation)
            assert layer.bias is not None
            layer.bias.zero_()


# -- spectra -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def mel_filters(window: int, device: torch.device) -> Tensor:
    """Return triangles of equal width in mel, `[window / 2 + 1, M]`, each with sum 1, for spectra of `SAMPLE_RATE`.

    Slaney's mel scale (linear to 1 kHz, then logarithmic). M is 80, or what a window resolves: an eighth of it.
    """
    count = min(80, window // 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about triangles between two bins, repaired below
        filters = mel_filter_bank(window // 2 + 1, count, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, None, "slaney")
    narrow = (filters.sum(0) == 0).nonzero()[0]
    # A triangle between two bins gets the bin nearest to its peak.
    peaks = mel_to_hertz(np.linspace(0, hertz_to_mel(SAMPLE_RATE / 2, "slaney"), count + 2)[1:-1], "slaney")
    bins = np.linspace(0, SAMPLE_RATE / 2, window // 2 + 1)[:, None]
    filters[np.abs(bins - peaks).argmin(0)[narrow], narrow] = 1.0
    return torch.from_numpy(filters / filters.sum(0)).float().to(device)


def mel_spectra(waves: Tensor, window: int) -> Tensor:
    """Return the mel spectrogram `[B, M, T]` of waves `[B, N]`, as amplitudes of partials; hop is a quarter window."""
    hann = torch.hann_window(window, device=waves.device)
    padded = F.pad(waves, (window // 2, window // 2))
    spectra = torch.stft(padded, window, window // 4, window=hann, center=False, return_complex=True)
    # A sine of amplitude a peaks at a * sum(hann) / 2. The square root needs a slope at 0.
    power = spectra.real.square() + spectra.imag.square()
    amplitudes = (power + (0.1 * _FLOOR * window / 4) ** 2).sqrt() * (4 / window)
    return (amplitudes.mT @ mel_filters(window, waves.device)).mT


def spectral_terms(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances between mel spectra of waves `[B, N]`, each the mean over all resolutions.

    Returns:
        The absolute difference of their logarithms in nats, and of the amplitudes relative to the target's mean.
    """
    logarithmic, linear = [], []
    for window in _WINDOWS:
        spectra, wanted = mel_spectra(output, window), mel_spectra(target, window)
        logarithmic.append((spectra.clamp_min(_FLOOR).log() - wanted.clamp_min(_FLOOR).log()).abs().mean())
        linear.append((spectra - wanted).abs().mean() / wanted.mean().clamp_min(_FLOOR))
    return torch.stack(logarithmic).mean(), torch.stack(linear).mean()


# -- the quantiser -----------------------------------------------------------------------------------------------------


class ResidualCodes:
    """Trains the codebooks of an `EncodecModel`: each codes the residual of those before it.

    Args:
        model: its quantiser's codebooks `embed` `[V, D]` are written in place.
    """

    def __init__(self, model: EncodecModel) -> None:
        self.books: list[Any] = [layer.codebook for layer in model.quantizer.layers]  # pyright: ignore
        self.averages = [CodeAverages(book.embed) for book in self.books]

    def state_dict(self) -> list[dict[str, Tensor]]:
        return [average.state_dict() for average in self.averages]

    def load_state_dict(self, saved: list[dict[str, Tensor]]) -> None:
        for average, state in zip(self.averages, saved, strict=True):
            average.load_state_dict(state)

    @torch.no_grad()
    def start(self, latents: Tensor, rng: np.random.Generator) -> None:
        """Start each codebook by k-means of the residuals of latents `[N, D]`."""
        left = latents
        for number, book in enumerate(self.books):
            book.embed.copy_(_first_codes(left, len(book.embed), rng))
            self.averages[number] = CodeAverages(book.embed)
            left = left - book.decode(book.encode(left))

    def quantise(
        self, latents: Tensor, count: int | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Code latents `[B, D, T]` with the first `count` codebooks, None: all.

        Returns:
            The decoder's input `[B, D, T]`, with the gradient passed straight through; the commitment loss, the mean
            squared distance between each codebook's input and its codes; and for each codebook its input `[N, D]` and
            the ids `[N]`.
        """
        left = rearrange(latents, "b d t -> (b t) d")
        wanted, ids, distances = [], [], []
        for book in self.books[:count]:
            chosen = book.encode(left.detach())
            codes = book.decode(chosen)
            wanted.append(left.detach())
            ids.append(chosen)
            distances.append(F.mse_loss(left, codes))
            left = left - codes
        coded = latents - left.view_as(latents.mT).mT.detach()
        # Straight through: the value of the codes, the gradient of the latents.
        return coded, torch.stack(distances).mean(), wanted, ids

    def follow(self, wanted: list[Tensor], ids: list[Tensor], decay: float) -> None:
        """Move codes towards their vectors."""
        for book, average, vectors, chosen in zip(self.books, self.averages, wanted, ids, strict=False):
            average.follow(book.embed, vectors, chosen, decay)

    def revive(
        self, wanted: list[Tensor], ids: list[Tensor], idle_steps: int, rng: np.random.Generator
    ) -> None:
        """Move unused codes onto badly coded vectors."""
        for book, average, vectors, chosen in zip(self.books, self.averages, wanted, ids, strict=False):
            noise = torch.from_numpy(rng.random(len(vectors), dtype=np.float32)).to(vectors.device)
            average.revive(book.embed, vectors, chosen, idle_steps, noise)

    @torch.no_grad()
    def finish(self) -> None:
        """Write the running sums to the model, where EnCodec keeps them."""
        for book, average in zip(self.books, self.averages, strict=True):
            book.cluster_size.copy_(average.count)
            book.embed_avg.copy_(average.total)


def _first_codes(vectors: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """Run k-means on vectors `[N, D]`, starting from `count` of them: codes `[count, D]`."""
    if len(vectors) < count:
        raise ValueError(f"{len(vectors)} latent vectors cannot start {count} codes; pass more clips.")
    chosen = torch.from_numpy(rng.permutation(len(vectors))[:count]).to(vectors.device)
    return k_means(vectors, vectors[chosen], 10)[0]


# -- training ----------------------------------------------------------------------------------------------------------


def tune_waves(count: int, seed: int) -> np.ndarray:
    """Return waves int16 `[count, NUM_SAMPLES]` of `tunes`: int16 halves the memory, with noise at -98 dB."""
    parts = []
    for start in range(0, count, 100):
        waves = sample_dataset(min(100, count - start), seed * 100_003 + start)[1]
        parts.append(np.rint(waves * 32767).astype(np.int16))
    return np.concatenate(parts)


def to_waves(samples: np.ndarray, device: torch.device) -> Tensor:
    """Return int16 `[B, N]` as floats `[B, 1, N]` in [-1, 1]."""
    return torch.from_numpy(samples).to(device).float()[:, None] / 32767


def train_codec(model: EncodecModel, settings: CodecTraining, out: Path, *, every: int = 250) -> dict:
    """Train in place, save the weights in `out`, and return the record, which is also written to `out/training.json`.

    Runs on the model's device. An interrupted run resumes from `out/resume.pt` with the same result; the finished run
    removes it.

    Raises:
        ValueError: the model's rate or hop differs from `tunes`, or there are fewer latent vectors than codes.
    """
    config = model.config
    if (config.sampling_rate, config.hop_length, config.audio_channels) != (SAMPLE_RATE, FRAME, 1):
        raise ValueError(
            f"a codec of {config.sampling_rate} Hz, {config.hop_length} samples a frame and {config.audio_channels} "
            f"channels; tunes are {SAMPLE_RATE} Hz, {FRAME} samples a frame, mono."
        )
    device = model.device
    samples = tune_waves(settings.clips, settings.seed)
    _keep_padding_on_host(model)
    codes = ResidualCodes(model)
    parameters = list(model.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.8, 0.99), weight_decay=0.0)
    descend = Descent([optimiser], settings.steps, settings.learning_rate)
    run = Trainer(
        model,
        settings,
        out,
        descend,
        every=every,
        parts={"model": model, "codes": codes},
        curve_every=50,
        digits=5,
    )

    def batch(step: int) -> tuple[int, np.random.Generator, Tensor]:
        # One generator per step, so that a resumed run sees the same data.
        rng = np.random.default_rng((settings.seed, step))
        return step, rng, to_waves(_batch(samples, settings, step, rng), device)

    def loss(step: int, rng: np.random.Generator, target: Tensor) -> tuple[Any, ...]:
        if step == settings.continuous_steps:
            codes.start(_latents(model, samples[:200], settings.bfloat16), rng)
        count = len(codes.books)
        if rng.random() < settings.quantiser_dropout:
            count = int(rng.integers(1, count + 1))
        quantised = codes if step >= settings.continuous_steps else None
        output, commitment, *coded = forward(model, quantised, target, count, bfloat16=settings.bfloat16)
        terms = codec_loss(output[:, 0], target[:, 0], settings)
        return terms + settings.commitment * commitment, terms, rng, *coded

    def follow(step: int, rng: np.random.Generator, wanted: list[Tensor], ids: list[Tensor]) -> None:
        if step >= settings.continuous_steps:
            codes.follow(wanted, ids, settings.average_decay)
            if step < settings.revive_until * settings.steps and step % 20 == 0:
                codes.revive(wanted, ids, settings.idle_steps, rng)

    def judged() -> dict[str, Any]:
        codes.finish()
        return judge(model, settings.held_out_clips)

    return run.run(loss, batch, judged, lambda: model.save_pretrained(out), after=follow)


def forward(
    model: EncodecModel,
    codes: ResidualCodes | None,
    waves: Tensor,
    count: int | None = None,
    *,
    bfloat16: bool = False,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Run waves `[B, 1, N]` through encoder, codes (None: none) and decoder; for the rest see `ResidualCodes`."""
    half = torch.autocast(waves.device.type, torch.bfloat16, enabled=bfloat16)
    with half:
        latents = model.encoder(waves)
    latents = latents.float()  # [B, D, T]
    commitment, wanted, ids = latents.new_zeros(()), [], []
    if codes is not None:
        latents, commitment, wanted, ids = codes.quantise(latents, count)
    with half:
        output = model.decoder(latents)
    return output.float(), commitment, wanted, ids


def codec_loss(output: Tensor, target: Tensor, settings: CodecTraining) -> Tensor:
    """Return the loss of waves `[B, N]`; see the module docstring."""
    wave = (output - target).abs().mean() / target.abs().mean().clamp_min(1e-3)
    logarithmic, linear = spectral_terms(output, target)
    return settings.wave_weight * wave + settings.spectral_weight * (logarithmic + linear)


def _batch(samples: np.ndarray, settings: CodecTraining, step: int, rng: np.random.Generator) -> np.ndarray:
    """Return crops int16 `[B, N]`, cut between frames, because notes begin there; at the end of a run whole clips."""
    crop, count = settings.crop, settings.batch_size
    if step >= (1 - settings.whole_clips) * settings.steps:
        crop, count = NUM_FRAMES, max(1, settings.batch_size * settings.crop // NUM_FRAMES)
    clips = rng.integers(len(samples), size=count)
    firsts = rng.integers(NUM_FRAMES - crop + 1, size=count) * FRAME
    return np.stack([samples[clip, at : at + crop * FRAME] for clip, at in zip(clips, firsts, strict=True)])


@torch.no_grad()
def _latents(model: EncodecModel, samples: np.ndarray, bfloat16: bool) -> Tensor:
    """Return latent vectors `[N, D]` of whole clips."""
    parts = []
    for start in range(0, len(samples), 10):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            latents = model.encoder(to_waves(samples[start : start + 10], model.device))
        parts.append(rearrange(latents.float(), "b d t -> (b t) d"))
    return torch.cat(parts)


def _keep_padding_on_host(model: EncodecModel) -> None:
    """Keep the padding sizes of convolutions in host memory: reading them from a GPU would stall it each time."""
    for module in model.modules():
        for name in ("stride", "kernel_size", "padding_total"):
            if name in module._buffers:
                setattr(module, name, getattr(module, name).cpu())


@torch.no_grad()
def judge(model: EncodecModel, count: int) -> dict:
    """Evaluate held-out clips after coding.

    Returns:
        si_sdr_db: mean over clips. spectral_distance_db: the same for mel bands. heard: the share of clips whose
        attributes the parser reads correctly, each and all. codes_used and perplexity: of each codebook.
    """
    tunes, waves = sample_dataset(count, 12345, held_out=True)
    ratios, distances, coded, used = [], [], [], []
    for part in torch.from_numpy(waves).split(10):
        target = part.to(model.device)
        codes = encode_waves(model, target[:, None])
        output = decode_codes(model, codes)[:, 0]
        ratios.append(si_sdr(output, target))
        distances.append(spectral_distance(output, target, sample_rate=SAMPLE_RATE))
        coded.append(output.clamp(-1, 1).cpu())
        used.append(rearrange(codes, "b k t -> k (b t)").cpu())
    heard = summarise([score(tune, wave) for tune, wave in zip(tunes, torch.cat(coded).numpy(), strict=True)])
    shares = {**heard["attributes"], "all_correct": heard["all_correct"]}
    counts = [torch.bincount(ids, minlength=model.config.codebook_size) for ids in torch.cat(used, 1)]
    laws = [number / number.sum() for number in counts]
    entropies = [-(law * law.clamp_min(1e-12).log()).sum().item() for law in laws]
    return {
        "si_sdr_db": round(torch.cat(ratios).mean().item(), 2),
        "spectral_distance_db": round(torch.cat(distances).mean().item(), 2),
        "heard": {name: round(share["value"], 3) for name, share in shares.items()},
        "codes_used": [int((number > 0).sum()) for number in counts],
        "perplexity": [round(math.exp(entropy), 1) for entropy in entropies],
    }


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded codec on procedural tunes: `python scripts/train codec --out FOLDER`.

Afterwards `--out` holds the weights of an `EncodecModel` and `training.json`. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    num_filters: int = 16
    hidden_size: int = 64
    codebook_size: int = 512
    num_codebooks: int = 4


def main() -> None:
    options, settings = read_options(HELP, Options, CodecTraining)
    sizes = (options.num_filters, options.hidden_size, options.codebook_size, options.num_codebooks)
    torch.manual_seed(settings.seed)
    model = EncodecModel(codec_config(*sizes))
    initialise(model)
    record = train_codec(model.to(options.device), settings, options.out)
    print_record(record)
