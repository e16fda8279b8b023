"""Plays `tunes`: additive synthesis of eight instruments, a bass and a drone, with a little room.

Every note is a sum of decaying partials, with the instrument's attack and vibrato, computed once per pitch and cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from visual_spec.data.tunes import FRAME, INSTRUMENTS, NUM_SAMPLES, SAMPLE_RATE, Note, Tune, sample_tunes

_LONGEST = 24_000  # samples of a cached wave; the longest note of a melody lasts 23,680 with its release
_HIGHEST = 7_400.0  # Hz; higher partials would alias, or be lost in resampling
_LEVEL = 0.115  # root mean square of the first fifth of a second of a note at full velocity
_BASS_LEVEL, _DRONE_LEVEL = 0.075, 0.05
_CHORUS = 0.2  # level of the second copy: the two of them beat gently, and never cancel
_FADE = 1_600  # samples at the end of a clip
_ROOM_LENGTH, _ROOM_T60, _ROOM_LEVEL = 4_000, 0.35, 0.16  # samples, seconds, gain of the reverberation
# Samples of the convolution: at least NUM_SAMPLES + _ROOM_LENGTH, with small prime factors.
_SPECTRUM = 72_000


@dataclass(frozen=True)
class Voice:
    """The sound of an instrument, times in seconds. `gate`: share of a note's length after which it is silent.

    Without a gate a note rings until the next one begins, and fades away under it.
    """

    attack: float
    release: float
    gate: float | None = None
    vibrato: float = 0.0  # cents
    vibrato_rate: float = 5.5  # Hz
    chorus: float = 0.0  # cents by which a second, softer copy is higher


VOICES: dict[str, Voice] = {
    "organ": Voice(0.010, 0.030, 0.95, chorus=3.0),
    "flute": Voice(0.030, 0.045, 0.97, vibrato=10.0, vibrato_rate=5.0),
    "violin": Voice(0.035, 0.050, 0.97, vibrato=14.0, vibrato_rate=6.0),
    "trumpet": Voice(0.018, 0.040, 0.95, vibrato=6.0, vibrato_rate=5.5),
    "guitar": Voice(0.003, 0.120),
    "marimba": Voice(0.002, 0.150),
    "bell": Voice(0.002, 0.200, chorus=5.0),
    "synth": Voice(0.004, 0.025, 0.92),
    "bass": Voice(0.006, 0.060, 0.95),
    "drone": Voice(0.120, 0.300, 0.99),
}


def _partials(instrument: str, pitch: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return frequency ratios, levels and decay times (seconds for 60 dB) of an instrument's partials, pitch in Hz."""
    k = np.arange(1, 40, dtype=float)
    forever = np.full(len(k), np.inf)
    if instrument == "organ":  # drawbars
        return np.array([1, 2, 3, 4, 6, 8.0]), np.array([1, 0.8, 0.5, 0.45, 0.22, 0.22]), forever[:6]
    if instrument == "flute":
        return k[:4], np.array([1, 0.22, 0.07, 0.02]), forever[:4]
    if instrument == "violin":  # a saw through the resonances of a body
        hertz = k * pitch
        body = (
            0.6 + 0.8 * np.exp(-(((hertz - 480) / 260) ** 2)) + 0.9 * np.exp(-(((hertz - 2_900) / 900) ** 2))
        )
        return k, body / k, forever
    if instrument == "trumpet":  # all partials up to about 1.5 kHz, and three at least, are strong
        return k, np.where(k == 1, 0.8, 1.0) / np.sqrt(1 + (k * pitch / max(1_500, 3 * pitch)) ** 5), forever
    if instrument == "guitar":  # plucked at a quarter of the string, which is a little stiff
        return (
            k * np.sqrt(1 + 8e-5 * k**2),
            (np.abs(np.sin(0.24 * np.pi * k)) + 0.05) / k**1.2,
            1.5 / (1 + 0.25 * (k - 1)),
        )
    if instrument == "marimba":  # a bar tuned to the double octave
        return np.array([1, 4.0, 9.7]), np.array([1, 0.3, 0.08]), np.array([0.55, 0.18, 0.08])
    if instrument == "bell":
        return (
            np.array([1, 2.0, 2.76, 4.07, 5.4]),
            np.array([1, 0.35, 0.5, 0.22, 0.3]),
            np.array([2.4, 1.6, 1.2, 0.8, 0.6]),
        )
    if instrument == "synth":  # a square wave
        return k[::2], 1 / k[::2], np.where(k[::2] > 0, 4.0, 0)
    if instrument == "bass":
        return k[:4], np.array([1, 0.22, 0.07, 0.02]), 1.1 / np.sqrt(k[:4])
    if instrument == "drone":
        return k[:3], np.array([1, 0.2, 0.07]), forever[:3]
    raise ValueError(f"unknown instrument {instrument!r}; allowed: {', '.join(VOICES)}")


@cache
def note_wave(instrument: str, pitch: int, length: int = _LONGEST) -> np.ndarray:
    """Return the wave of a note of `VOICES` without its release, float32 `[length]`; `pitch`: MIDI (A4 = 69)."""
    hertz = 440.0 * 2 ** ((pitch - 69) / 12)
    ratios, levels, decays = _partials(instrument, hertz)
    voice = VOICES[instrument]
    kept = ratios * hertz < _HIGHEST
    ratios, levels, decays = ratios[kept], levels[kept], decays[kept]
    seconds = np.arange(length) / SAMPLE_RATE
    # Vibrato sets in after the attack, as players do it. The integral of the pitch gives the phase.
    depth = voice.vibrato / 1_200 * np.log(2) * np.clip((seconds - 0.12) / 0.2, 0, 1)
    cycles = hertz * np.cumsum(1 + depth * np.sin(2 * np.pi * voice.vibrato_rate * seconds)) / SAMPLE_RATE
    wave = np.zeros(length)
    copies = [(1.0, 1.0)] if voice.chorus == 0 else [(1.0, 1.0), (2 ** (voice.chorus / 1_200), _CHORUS)]
    for number, (ratio, level, decay) in enumerate(zip(ratios, levels, decays, strict=True)):
        # Brass brightens during its attack: higher partials come later.
        rise = voice.attack + (0.004 * number if instrument == "trumpet" else 0)
        envelope = level * np.sin(0.5 * np.pi * np.clip(seconds / rise, 0, 1)) ** 2
        if np.isfinite(decay):
            envelope *= 10 ** (-3 * seconds / decay)
        for higher, share in copies:
            # Reduced to fractions of a cycle first: single precision is then enough, and faster.
            phase = (higher * ratio * cycles % 1).astype(np.float32)
            wave += share * envelope * np.sin(np.float32(2 * np.pi) * phase)
    wave /= np.sqrt(np.mean(wave[: SAMPLE_RATE // 5] ** 2))
    wave = wave.astype(np.float32)
    wave.flags.writeable = False
    return wave


@cache
def _letting_go(samples: int) -> np.ndarray:
    """Return the half cosine with which a note ends, float32."""
    return (0.5 + 0.5 * np.cos(np.pi * np.arange(samples) / samples)).astype(np.float32)


@cache
def _room() -> np.ndarray:
    """Return the spectrum of the room: the direct sound, then dense echoes that decay and lose their highs."""
    noise = np.random.default_rng(20_000).normal(size=_ROOM_LENGTH)
    noise = np.convolve(noise, [0.25, 0.5, 0.25], "same")
    seconds = np.arange(_ROOM_LENGTH) / SAMPLE_RATE
    echoes = noise * 10 ** (-3 * seconds / _ROOM_T60) * np.clip(seconds / 0.01, 0, 1)
    echoes *= _ROOM_LEVEL / np.sqrt(np.sum(echoes**2))
    echoes[0] = 1.0
    return np.fft.rfft(echoes.astype(np.float32), _SPECTRUM)


def render(tune: Tune) -> np.ndarray:
    """Play a tune by one of `INSTRUMENTS`: `[NUM_SAMPLES]` float32 at 16 kHz, within -1 and 1."""
    if tune.instrument not in INSTRUMENTS:
        raise ValueError(f"unknown instrument {tune.instrument!r}; allowed: {', '.join(INSTRUMENTS)}")
    clip = np.zeros(_SPECTRUM, np.float32)
    for note in tune.notes:
        _add(clip, tune.instrument, note, _LEVEL)
    for note in tune.bass:
        _add(clip, tune.backing, note, _DRONE_LEVEL if tune.backing == "drone" else _BASS_LEVEL)
    clip[NUM_SAMPLES:] = 0
    clip = np.fft.irfft(np.fft.rfft(clip) * _room(), _SPECTRUM)[:NUM_SAMPLES].astype(np.float32)
    clip[-_FADE:] *= _letting_go(_FADE)
    return clip * np.float32(min(1.0, 0.98 / max(float(np.abs(clip).max()), 1e-6)))


def sample_dataset(count: int, seed: int, *, held_out: bool = False) -> tuple[list[Tune], np.ndarray]:
    """Return the tunes of `sample_tunes`, and their waves `[count, NUM_SAMPLES]` float32."""
    tunes = sample_tunes(count, seed, held_out=held_out)
    waves = np.empty((count, NUM_SAMPLES), np.float32)
    for wave, tune in zip(waves, tunes, strict=True):
        wave[:] = render(tune)
    return tunes, waves


def _add(clip: np.ndarray, instrument: str, note: Note, level: float) -> None:
    voice = VOICES[instrument]
    release = int(voice.release * SAMPLE_RATE)
    held = note.length * FRAME if voice.gate is None else int(voice.gate * note.length * FRAME) - release
    longest = _LONGEST if held + release <= _LONGEST else NUM_SAMPLES
    wave = note_wave(instrument, note.pitch, longest)[: held + release] * np.float32(level * note.velocity)
    wave[held:] *= _letting_go(release)[: len(wave) - held]
    start = note.start * FRAME
    end = min(start + len(wave), len(clip))
    clip[start:end] += wave[: end - start]
