"""Finds the notes, the instrument and the backing of a clip of `tunes`, without a network and the synthesizer.

1. Onsets are the peaks of the spectral flux above the bass (SuperFlux: Boeck and Widmer 2013).
2. Tempo and rhythm come from the grid whose onsets agree best with the onsets that were found.
3. Each note's pitch is the one whose harmonics hold most of the note's spectrum.
4. The instrument is the one with the nearest partials and decay.
5. The sound below the melody, and whether it pulses, distinguishes solo, drone and bass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from visual_spec.data.tunes import BAR, FRAME, MODES, RHYTHMS, SAMPLE_RATE, TEMPI, TONICS

_HOP = 80  # samples between columns of the flux: 5 ms
_WINDOW = 512  # samples: shorter than the shortest note of 1,280
_LAG = 3  # columns
_LOWEST_BAND = 190.0  # Hz; the bass ends at 156 Hz
_UNITS = 0.066 * 1.012 ** np.arange(118)  # candidates for the seconds of a sixteenth note, up to 0.27
_TOLERANCE = 0.018  # seconds, one standard deviation, between an onset and its place on the grid
# Levels in dB of the sum of these multiples of the pitch, at least _FLOOR, and growth in dB/s: measured, not computed.
_PARTIALS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 2.76, 5.4])
_SOUNDS = {
    "organ": (-3, -5, -10, -12, -30, -18, -30, -18, -30, -30, -7),
    "flute": (0, -14, -24, -30, -30, -30, -30, -30, -30, -30, -3),
    "violin": (-1, -11, -16, -17, -17, -18, -20, -22, -30, -30, -6),
    "trumpet": (-7, -5, -7, -10, -12, -16, -19, -22, -30, -30, -2),
    "guitar": (-1, -6, -15, -30, -25, -26, -30, -30, -30, -30, -43),
    "marimba": (0, -30, -30, -26, -30, -30, -30, -30, -30, -30, -105),
    "bell": (-1, -12, -30, -21, -30, -30, -30, -30, -11, -22, -38),
    "synth": (-1, -30, -11, -30, -15, -30, -18, -30, -30, -30, -16),
}
_FLOOR, _PARTIAL_SPREAD, _DECAY_SPREAD = -30.0, 3.0, 20.0
_FARTHEST = 12.0  # mean squared distance in spreads beyond which a sound has no known instrument
_LEAST_BASS = 0.01  # share of a clip's power below which nothing sounds under the melody
_TAIL = 8_000  # samples at the end in which the bass rests on the tonic
_STRAY = 0.03  # share of tones outside the scale, misread ones among them
_SILENCE = 1e-4  # largest sample of a silent clip
_LEAST_FIT = 0.5  # of the grid; below it, the onsets have no rhythm
_LENGTH = 8_192  # samples a note's spectrum is padded to: a bin is 2 Hz
_LOWEST_PITCH, _HIGHEST_PITCH = 53, 86  # range of MIDI numbers searched for a melody's notes


@dataclass(frozen=True)
class FoundNote:
    """One note of a melody. `time`, `length`: seconds of the onset, and until the next one; `pitch`: MIDI number."""

    time: float
    length: float
    pitch: int


@dataclass(frozen=True)
class TuneFacts:
    """The audible attributes of a clip; None for those not found."""

    instrument: str | None = None
    tonic: str | None = None
    mode: str | None = None
    tempo: str | None = None
    contour: str | None = None
    rhythm: str | None = None
    backing: str | None = None
    beats_per_minute: float | None = None
    notes: tuple[FoundNote, ...] = ()


@dataclass(frozen=True)
class Grid:
    """The expected places of notes. `unit`: seconds of a sixteenth note; `fit`: agreement with the onsets, 0 to 1."""

    rhythm: str
    unit: float
    fit: float


def spectrogram(wave: np.ndarray, window: int, hop: int, length: int) -> np.ndarray:
    """Return magnitudes `[T, length / 2 + 1]` float32 of Hann windows centred on every `hop`-th sample, zero-padded."""
    padded = np.pad(wave, window // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop]
    return np.abs(np.fft.rfft(frames * np.hanning(window + 1)[:-1].astype(np.float32), length))


@cache
def _bands(length: int) -> np.ndarray:
    """Return triangular filters a semitone apart `[bins, bands]`, without those that hold no bin."""
    edges = _LOWEST_BAND * 2 ** (np.arange(64) / 12)
    hertz = np.arange(length // 2 + 1)[:, None] * SAMPLE_RATE / length
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    filters = np.clip(np.minimum((hertz - low) / (centre - low), (high - hertz) / (high - centre)), 0, 1)
    return filters[:, filters.sum(0) > 0].astype(np.float32)


def without_bass(wave: np.ndarray) -> np.ndarray:
    """Return the part of a wave above 175 Hz, which holds the melody."""
    spectrum = np.fft.rfft(wave)
    spectrum[: int(175.0 * len(wave) / SAMPLE_RATE)] = 0
    return np.fft.irfft(spectrum, len(wave)).astype(np.float32)


def spectral_flux(wave: np.ndarray) -> np.ndarray:
    """Return how much louder each 5 ms is than 15 ms before, summed over the bands: `[T]`.

    A band is compared with the loudest of itself and its neighbours, so that vibrato does not count as an onset.
    """
    loud = spectrogram(wave, _WINDOW, _HOP, 2 * _WINDOW) @ _bands(2 * _WINDOW)
    loud = np.log1p(8 * loud / max(float(np.percentile(loud, 99)), 1e-9))
    wide = np.pad(loud, ((0, 0), (1, 1)), mode="edge")
    before = np.maximum(np.maximum(wide[:, :-2], wide[:, 1:-1]), wide[:, 2:])
    # The power favours a tone, which rises much in few bands, over noise, which rises little in many bands.
    rise = (np.maximum(0, loud[_LAG:] - before[:-_LAG]) ** 1.5).sum(1)
    return np.pad(rise, (_LAG, 0))


def find_onsets(wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return times in seconds and strengths (1: as strong as the strongest) of the onsets of a clip."""
    flux = spectral_flux(wave)
    reach, around = 6, 20  # columns: no two onsets within 30 ms; the mean is over 200 ms
    peak = np.lib.stride_tricks.sliding_window_view(np.pad(flux, reach), 2 * reach + 1).max(1)
    mean = np.lib.stride_tricks.sliding_window_view(np.pad(flux, around), 2 * around + 1).mean(1)
    # Keep the strong onsets. If there are few, as in a clip of one long note, the strongest sets the threshold.
    top = max(float(np.percentile(flux, 98)), 0.2 * float(flux.max()), 1e-9)
    columns = np.flatnonzero((flux >= peak) & (flux > mean + 0.12 * top))
    return columns * _HOP / SAMPLE_RATE, np.minimum(1, flux[columns] / top)


def fit_grid(times: np.ndarray, strengths: np.ndarray) -> Grid | None:
    """Return the rhythm and tempo whose onsets agree best with the found ones; None for fewer than four onsets.

    The agreement is the F-measure of expected and found onsets. The grid begins at one of the first three onsets,
    because the first may not be a note, and ends with the last.
    """
    if len(times) < 4:
        return None
    weights = np.minimum(1, strengths / np.median(strengths))
    raster = np.arange(0, times[-1] + 0.2, 0.005)
    near = np.exp(-0.5 * ((raster[:, None] - times) / _TOLERANCE) ** 2).max(1)
    best: Grid | None = None
    for rhythm, lengths in RHYTHMS.items():
        bars = int((times[-1] - times[0]) / (BAR * _UNITS[0])) + 2
        pattern = np.add.outer(BAR * np.arange(bars), np.cumsum((0, *lengths[:-1]))).ravel()  # sixteenths
        for start in np.add.outer(times[:3], (-0.01, 0.0, 0.01)).ravel():
            expected = start + _UNITS[:, None] * pattern  # [units, onsets]
            inside = expected < times[-1] + 2 * _TOLERANCE
            index = np.clip(np.rint(expected / 0.005).astype(int), 0, len(raster) - 1)
            agreement = 2 * (near[index] * inside).sum(1) / (inside.sum(1) + weights.sum())
            place = int(agreement.argmax())
            if best is None or agreement[place] > best.fit:
                best = Grid(rhythm, float(_UNITS[place]), float(agreement[place]))
    return best


def note_spectra(wave: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return magnitudes `[N, _LENGTH / 2 + 1]` of the notes that begin at `times`, from 10 ms on to at most 200 ms.

    A note ends with the next onset. Windows are scaled so that a steady sine counts the same in each.
    """
    ends = np.append(times[1:], len(wave) / SAMPLE_RATE)
    spectra = np.zeros((len(times), _LENGTH // 2 + 1), np.float32)
    for row, (start, end) in enumerate(zip(times, ends, strict=True)):
        first, last = int((start + 0.010) * SAMPLE_RATE), int(min(end - 0.005, start + 0.210) * SAMPLE_RATE)
        window = np.hanning(max(last - first, 320) + 2)[1:-1].astype(np.float32)
        part = wave[first : first + len(window)]
        window = window[: len(part)]
        spectra[row] = np.abs(np.fft.rfft(part * window, _LENGTH)) * (2 / max(window.sum(), 1.0))
    return spectra


def partial_levels(spectra: np.ndarray, hertz: np.ndarray, cents: float) -> np.ndarray:
    """Return the highest magnitude within some cents of each frequency: `[N, P]`; `hertz`: `[P]` or `[N, P]`."""
    steps = 2.0 ** (np.linspace(-cents, cents, 7) / 1_200)
    bins = np.rint(hertz[..., None] * steps * _LENGTH / SAMPLE_RATE).astype(int)
    known = bins < spectra.shape[1]
    bins = np.where(known, bins, 0)
    if hertz.ndim == 1:
        return (spectra[:, bins] * known).max(-1)
    return (
        np.take_along_axis(spectra[:, None, :], bins.reshape(len(bins), 1, -1), 2).reshape(bins.shape) * known
    ).max(-1)


def find_pitches(spectra: np.ndarray) -> np.ndarray:
    """The MIDI number of each note `[N]`: the pitch whose harmonics hold most of its spectrum, its own tone first.

    Magnitude half way between the harmonics counts against a pitch: they are then harmonics of a tone an octave below.
    """
    pitches = np.arange(_LOWEST_PITCH, _HIGHEST_PITCH + 1)
    hertz = 440.0 * 2 ** ((pitches - 69) / 12)
    multiples = np.array([1, 2, 3, 4, 5, 6, 1.5, 2.5, 3.5, 4 / 3, 5 / 3])
    weights = np.array([*0.75 ** np.arange(6), -0.6, -0.4, -0.2, -0.4, -0.4])
    levels = partial_levels(spectra, np.outer(hertz, multiples).ravel(), 40.0)
    levels = np.sqrt(levels.reshape(len(spectra), len(pitches), len(multiples)))
    return pitches[((levels @ weights) * levels[..., 0]).argmax(1)]


def find_instrument(
    wave: np.ndarray, times: np.ndarray, spectra: np.ndarray, pitches: np.ndarray
) -> str | None:
    """Return the instrument whose partials and decay are nearest to a clip's notes; None if none is near."""
    hertz = 440.0 * 2 ** ((pitches - 69) / 12)
    levels = partial_levels(spectra, np.outer(hertz, _PARTIALS), 45.0)
    whole = np.sqrt((levels**2).sum(1, keepdims=True)) + 1e-9
    spectrum = np.median(np.maximum(_FLOOR, 20 * np.log10(levels / whole + 1e-9)), 0)
    table = np.array(list(_SOUNDS.values()), float)
    distances = ((table[:, :-1] - spectrum) ** 2).mean(1) / _PARTIAL_SPREAD**2
    distances += ((table[:, -1] - find_decay(wave, times)) / _DECAY_SPREAD) ** 2 / 2
    return list(_SOUNDS)[int(distances.argmin())] if distances.min() < _FARTHEST else None


def find_decay(wave: np.ndarray, times: np.ndarray) -> float:
    """The growth of notes in dB/s after their peak (negative: fade): the median over notes of 0.25 s and more."""
    power = np.convolve(wave**2, np.hanning(242)[1:-1], "same")[::_HOP]  # of 15 ms, every 5 ms
    decibels = 10 * np.log10(power + 1e-6 * max(float(power.max()), 1e-9))
    ends = np.append(times[1:], min(times[-1] + 0.6, len(wave) / SAMPLE_RATE - 0.1))
    slopes = []
    for start, end in zip(times, ends, strict=True):
        part = decibels[int(start * SAMPLE_RATE / _HOP) : int(end * SAMPLE_RATE / _HOP)]
        if len(part) >= 50:
            part = part[part.argmax() : int(0.75 * len(part))]  # the rest is the release
            if len(part) > 3:
                slopes.append(np.polyfit(np.arange(len(part)) * _HOP / SAMPLE_RATE, part, 1)[0])
    return float(np.clip(np.median(slopes), -150, 30)) if slopes else 0.0


def find_backing(wave: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the kind of backing, and the strength of each tone of the octave from E2 at the end of the clip: `[12]`.

    The tones are ordered from C.
    """
    power = spectrogram(wave, 4 * _WINDOW, 4 * _HOP, 4 * _WINDOW) ** 2
    hertz = np.arange(power.shape[1]) * SAMPLE_RATE / (4 * _WINDOW)
    low = power[:, (hertz > 74) & (hertz < 165)].sum(1)
    tail = np.abs(np.fft.rfft(wave[-_TAIL:] * np.hanning(min(len(wave), _TAIL)), 2 * _LENGTH))
    numbers = 40 + np.arange(12)
    bins = np.rint(440.0 * 2 ** ((numbers - 69) / 12) * 2 * _LENGTH / SAMPLE_RATE).astype(int)
    tones = np.roll(np.max([tail[bins - 1], tail[bins], tail[bins + 1]], axis=0), 4)  # number 40 is an E
    if low.mean() < _LEAST_BASS * power.sum(1).mean():
        return "solo", tones
    decibels = 10 * np.log10(low[len(low) // 12 : -len(low) // 10] + 1e-9)
    return ("bass" if np.median(np.abs(np.diff(decibels))) > 0.45 else "drone"), tones


def find_key(pitches: np.ndarray, lengths: np.ndarray, bass: int | None) -> tuple[str, str]:
    """Return the most probable tonic and mode of a melody: tones in the scale, and the tonic at the end, are probable.

    Args:
        pitches, lengths: MIDI numbers and seconds of the notes `[N]`.
        bass: the tone of the backing at the end, in semitones above C.
    """
    best = (-np.inf, "", "")
    weights = np.minimum(1.0, lengths / np.median(lengths))  # a misread note is mostly short
    for tonic, number in TONICS.items():
        tones = (pitches - number) % 12
        ends = np.log(0.9 if tones[-1] == 0 else 0.02) + np.log(0.5 if tones[0] == 0 else 0.05)
        if bass is not None:
            ends += np.log(0.9 if bass == number else 0.01)
        for mode, scale in MODES.items():
            likely = np.full(12, _STRAY / (12 - len(scale)))
            likely[list(scale)] = (1 - _STRAY) / len(scale)
            fit = float(ends + (weights * np.log(likely[tones])).sum())
            best = max(best, (fit, tonic, mode))
    return best[1], best[2]


def find_contour(times: np.ndarray, pitches: np.ndarray) -> str:
    """Return the shape of a melody, from the line and the tent that fit it best.

    Rising, falling: the line rises or falls by more than half an octave. Arching, dipping: the tent points up or down
    by more than 5.5 semitones, and by more than half of the line's rise. Hovering: none of these.
    """
    along = (times - times[0]) / max(times[-1] - times[0], 1e-9)
    heard = np.linspace(0, 1, 100)
    sung = pitches[np.searchsorted(along, heard, side="right") - 1]
    line, tent = heard - 0.5, 1 - np.abs(2 * heard - 1)
    tent = tent - tent.mean()  # line and tent are orthogonal, so each is fitted separately
    rise, height = sung @ line / (line @ line), sung @ tent / (tent @ tent)
    if abs(height) > max(5.5, 0.5 * abs(rise)):
        return "arching" if height > 0 else "dipping"
    if abs(rise) > 6.0:
        return "rising" if rise > 0 else "falling"
    return "hovering"


def parse_clip(wave: np.ndarray) -> TuneFacts:
    """Parse a clip, mono at 16 kHz.

    Raises:
        TypeError: the clip is not an array of floating-point numbers.
        ValueError: it is not one-dimensional, is shorter than half a second, or is not finite.
    """
    if not isinstance(wave, np.ndarray) or not np.issubdtype(wave.dtype, np.floating):
        raise TypeError(f"a NumPy array of floating-point samples is needed, got {_describe(wave)}")
    if wave.ndim != 1 or len(wave) < SAMPLE_RATE // 2:
        raise ValueError(
            f"wave of shape {list(wave.shape)} given; pass [samples] at 16 kHz, at least 8,000 of them"
        )
    if not np.isfinite(wave).all():
        raise ValueError("the wave holds values that are not finite; look at what made it")
    wave = wave.astype(np.float32) - np.float32(wave.mean())
    if np.abs(wave).max() < _SILENCE:
        return TuneFacts()
    wave = wave / np.abs(wave).max()
    melody = without_bass(wave)
    times, strengths = find_onsets(melody)
    grid = fit_grid(times, strengths)
    if grid is None or grid.fit < _LEAST_FIT:
        return TuneFacts(backing=find_backing(wave)[0])
    spectra = note_spectra(melody, times)
    pitches = find_pitches(spectra)
    lengths = np.diff(np.append(times, times[-1] + BAR * grid.unit))
    backing, tones = find_backing(wave)
    tonic, mode = find_key(pitches, lengths, None if backing == "solo" else int(tones.argmax()))
    frames = grid.unit * SAMPLE_RATE / FRAME
    tempo = min(TEMPI, key=lambda name: abs(np.log(frames / np.mean(TEMPI[name]))))
    return TuneFacts(
        find_instrument(melody, times, spectra, pitches),
        tonic,
        mode,
        tempo,
        find_contour(times, pitches),
        grid.rhythm,
        backing,
        15.0 / grid.unit,
        tuple(FoundNote(float(t), float(n), int(p)) for t, n, p in zip(times, lengths, pitches, strict=True)),
    )


def _describe(value: object) -> str:
    """Return a value's type, and its dtype if it is an array."""
    return (
        f"{type(value).__name__} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    )
