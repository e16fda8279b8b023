"""The ear for tunes and the reader of captions, against the ground truth and against clips made by hand."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.refusals import refuses
from visual_spec.data.tunes import (
    ATTRIBUTES,
    FRAME,
    INSTRUMENTS,
    NUM_FORMS,
    NUM_SAMPLES,
    SAMPLE_RATE,
    Tune,
    caption,
    compose,
    sample_tunes,
)
from visual_spec.data.tunes_finder import find_contour, find_key, find_onsets, fit_grid, without_bass
from visual_spec.data.tunes_parser import TuneFacts, WantedTune, parse_caption, parse_clip, score, score_facts
from visual_spec.data.tunes_synth import render, sample_dataset
from visual_spec.eval.quality.accuracy import summarise


def _noise(wave: np.ndarray, decibels: float, rng: np.random.Generator) -> np.ndarray:
    spread = np.sqrt(np.mean(wave**2)) * 10 ** (-decibels / 20)
    return (wave + rng.normal(0, spread, len(wave))).astype(np.float32)


def _low_pass(wave: np.ndarray, hertz: float) -> np.ndarray:
    n = np.arange(-32, 33)
    kernel = np.sinc(2 * hertz / SAMPLE_RATE * n) * np.hamming(65)
    return np.convolve(wave, kernel / kernel.sum(), "same").astype(np.float32)


def _mu_law(wave: np.ndarray) -> np.ndarray:
    """There and back through 8 bits (ITU-T G.711's curve)."""
    squeezed = np.sign(wave) * np.log1p(255 * np.abs(wave)) / np.log1p(255)
    steps = np.rint((squeezed + 1) / 2 * 255) / 255 * 2 - 1
    return (np.sign(steps) * np.expm1(np.abs(steps) * np.log1p(255)) / 255).astype(np.float32)


def _gain(wave: np.ndarray, decibels: float) -> np.ndarray:
    return np.clip(wave * np.float32(10 ** (decibels / 20)), -1, 1)


DISTURBANCES = {
    "none": lambda wave, rng: wave,
    "noise 30 dB": lambda wave, rng: _noise(wave, 30, rng),
    "low-pass 5 kHz": lambda wave, rng: _low_pass(wave, 5_000),
    "gain +3 dB": lambda wave, rng: _gain(wave, 3),
    "gain -3 dB": lambda wave, rng: _gain(wave, -3),
    "mu-law 8 bit": lambda wave, rng: _mu_law(wave),
    "all": lambda wave, rng: _mu_law(_noise(_low_pass(_gain(wave, -3), 5_000), 30, rng)),
    "noise 20 dB": lambda wave, rng: _noise(wave, 20, rng),
}


def _shares(waves, prompts) -> dict[str, float]:
    """The share of clips with each attribute, of those whose prompts ask for it, and of those with all of them."""
    found = summarise([score(prompt, wave) for prompt, wave in zip(prompts, waves, strict=True)])
    shares = {name: figure["value"] for name, figure in found["attributes"].items()}
    return {**shares, "all_correct": found["all_correct"]["value"]}


def _accuracy(count: int, seed: int, disturbance: str, floor: float) -> None:
    tunes, waves = sample_dataset(count, seed)
    rng = np.random.default_rng(seed)
    waves = [DISTURBANCES[disturbance](wave, rng) for wave in waves]
    shares = _shares(waves, tunes)
    assert set(shares) == {*ATTRIBUTES, "all_correct"}
    assert min(shares[name] for name in ATTRIBUTES) >= floor, shares


def test_accuracy_on_ground_truth() -> None:
    _accuracy(60, 101, "none", 0.97)


def test_accuracy_on_disturbed_clips() -> None:
    _accuracy(60, 102, "all", 0.97)


@pytest.mark.slow
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_accuracy_over_six_hundred_clips(disturbance: str) -> None:
    _accuracy(600, 103, disturbance, 0.97)


@pytest.mark.slow
def test_heavy_noise_degrades_gently() -> None:
    tunes, waves = sample_dataset(200, 104)
    rng = np.random.default_rng(0)
    shares = _shares([_noise(wave, 10, rng) for wave in waves], tunes)
    assert min(shares[name] for name in ATTRIBUTES) >= 0.85, shares


def test_notes_are_those_of_the_tune() -> None:
    right = total = spurious = 0
    tunes, waves = sample_dataset(60, 105)
    for tune, wave in zip(tunes, waves, strict=True):
        facts = parse_clip(wave)
        times = np.array([note.time for note in facts.notes])
        for note in tune.notes:
            nearest = int(np.abs(times - note.start * FRAME / SAMPLE_RATE).argmin())
            near = abs(times[nearest] - note.start * FRAME / SAMPLE_RATE) < 0.035
            right += near and facts.notes[nearest].pitch == note.pitch
        total += len(tune.notes)
        spurious += max(0, len(facts.notes) - len(tune.notes))
        assert facts.beats_per_minute == pytest.approx(tune.beats_per_minute, rel=0.025)
    assert right >= 0.98 * total and spurious <= 0.02 * total


def _synthetic(
    pitches: list[int],
    starts: list[float],
    overtones: dict[int, float],
    fade: float = 0.0,
    seconds: float = 4.0,
) -> np.ndarray:
    """A melody by plain sums of sines, with nothing of the package's synthesizer."""
    wave = np.zeros(int(seconds * SAMPLE_RATE))
    ends = [*starts[1:], min(starts[-1] + 0.7, seconds)]
    for pitch, start, end in zip(pitches, starts, ends, strict=True):
        t = np.arange(int((end - start) * SAMPLE_RATE)) / SAMPLE_RATE
        shape = np.minimum(1, np.minimum(t / 0.01, (t[-1] - t) / 0.03)) * 10 ** (fade * t / 20)
        hertz = 440 * 2 ** ((pitch - 69) / 12)
        tone = sum(level * np.sin(2 * np.pi * k * hertz * t) for k, level in overtones.items())
        wave[int(start * SAMPLE_RATE) :][: len(t)] += shape * tone
    return (0.25 * wave / np.abs(wave).max()).astype(np.float32)


SQUARE = {k: 1 / k for k in (1, 3, 5, 7, 9)}


def test_a_scale_played_by_hand() -> None:
    """C major up in even eighths at 100 beats a minute, by a square wave."""
    pitches = [60, 62, 64, 65, 67, 69, 71, 74, 72]
    starts = [0.05 + 0.3 * i for i in range(9)]
    facts = parse_clip(_synthetic(pitches, starts, SQUARE, fade=-16))
    assert [note.pitch for note in facts.notes] == pitches
    assert [note.time for note in facts.notes] == pytest.approx(starts, abs=0.02)
    assert facts.beats_per_minute == pytest.approx(100, rel=0.02)
    assert (facts.instrument, facts.tonic, facts.mode) == ("synth", "C", "major")
    assert (facts.tempo, facts.rhythm, facts.contour, facts.backing) == ("moderate", "even", "rising", "solo")


def test_a_tune_over_a_drone_played_by_hand() -> None:
    """A minor, down and up again, dotted at 72 beats a minute, over a low A; overtones like those of a flute."""
    unit = 60 / 72 / 4
    starts = [0.05 + unit * place for place in (0, 3, 4, 7, 8, 11, 12, 15, 16)]
    pitches = [81, 77, 76, 72, 69, 72, 76, 80, 81]
    pitches[7] = 79
    wave = _synthetic(pitches, starts, {1: 1.0, 2: 0.22, 3: 0.07})
    assert parse_clip(wave).backing == "solo"
    t = np.arange(len(wave)) / SAMPLE_RATE
    low = (0.1 * np.sin(2 * np.pi * 110 * t)).astype(np.float32)
    facts = parse_clip(wave + low)
    assert [note.pitch for note in facts.notes] == pitches
    said = ["flute", "A", "minor", "slow", "dipping", "dotted", "drone"]
    assert [getattr(facts, name) for name in ATTRIBUTES] == said
    beats = 0.5 + 0.5 * np.sign(np.sin(2 * np.pi * t / (4 * unit)))
    assert parse_clip((wave + low * beats).astype(np.float32)).backing == "bass"


@pytest.mark.parametrize(("rhythm", "lengths"), [(name, value) for name, value in [
    ("even", (2, 2, 2, 2)), ("dotted", (3, 1, 3, 1)), ("syncopated", (3, 3, 2)), ("galloping", (2, 1, 1, 2, 1, 1)),
]])  # fmt: skip
def test_grids_are_fitted_at_any_tempo_and_with_wrong_onsets(rhythm: str, lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    for unit in (0.075, 0.09, 0.13, 0.165, 0.2, 0.23):
        bars = max(2, int(3.2 / (8 * unit)))
        places = np.cumsum((0, *(lengths * bars)))
        times = 0.05 + unit * places + rng.uniform(-0.006, 0.006, len(places))
        grid = fit_grid(times, np.ones(len(times)))
        assert grid is not None and grid.rhythm == rhythm and grid.unit == pytest.approx(unit, rel=0.02)
        assert grid.fit > 0.9
        # One onset missed in the middle, and one heard too many.
        kept = np.sort(np.append(np.delete(times, len(times) // 2), 0.05 + unit * 2.47))
        grid = fit_grid(kept, np.ones(len(kept)))
        assert grid is not None and grid.rhythm == rhythm and grid.unit == pytest.approx(unit, rel=0.02)
    assert fit_grid(np.array([0.1, 0.2, 0.3]), np.ones(3)) is None


def test_keys_are_told_by_the_tones_and_the_ends() -> None:
    long = np.ones(9)
    a_minor = np.array([69, 71, 72, 74, 76, 77, 79, 71, 69])
    assert find_key(a_minor, long, None) == ("A", "minor")
    c_major = np.array([72, 71, 69, 74, 76, 77, 79, 71, 72])  # the same tones
    assert find_key(c_major, long, None) == ("C", "major")
    assert find_key(np.array([62, 64, 66, 69, 71, 74, 71, 64, 62]), long, None) == ("D", "pentatonic")
    assert find_key(np.array([64, 67, 69, 70, 71, 74, 70, 67, 64]), long, None) == ("E", "blues")
    # One false tone does not change the mode, if it is short; what sounds below helps when the end is lost.
    assert find_key(np.append(c_major, 72), np.array([*long[:4], 0.2, *long[:5]]), None) == ("C", "major")
    false = np.array([72, 71, 69, 74, 76, 78, 79, 71, 72])
    assert find_key(false, np.array([1, 1, 1, 1, 1, 0.2, 1, 1, 1.0]), None) == ("C", "major")
    assert find_key(c_major[:-1], long[:-1], 0) == ("C", "major")


def test_contours_of_plain_lines() -> None:
    times = np.arange(13) / 4
    up = np.linspace(60, 72, 13).round().astype(int)
    assert find_contour(times, up) == "rising" and find_contour(times, up[::-1]) == "falling"
    hill = 60 + np.array([0, 2, 4, 6, 8, 10, 12, 10, 8, 6, 4, 2, 0])
    assert find_contour(times, hill) == "arching" and find_contour(times, 130 - hill) == "dipping"
    assert find_contour(times, np.tile([60, 64, 58], 5)[:13]) == "hovering"
    assert find_contour(times, np.full(13, 60)) == "hovering"


def test_onsets_are_not_those_of_vibrato_or_of_the_bass() -> None:
    t = np.arange(NUM_SAMPLES) / SAMPLE_RATE
    phase = 2 * np.pi * 440 * (t - 0.02 * np.cos(2 * np.pi * 6 * t) / (2 * np.pi * 6))  # 34 cents each way
    steady = sum(np.sin(k * phase) / k for k in range(1, 8)) * np.clip(t / 0.02, 0, 1) * 0.1
    bass = 0.2 * np.sin(2 * np.pi * 82.4 * t) * np.clip(9 * np.sin(2 * np.pi * 2 * t), 0, 1)
    times, _ = find_onsets(without_bass((steady + bass).astype(np.float32)))
    assert len(times) <= 2 and times[0] < 0.05


@pytest.mark.parametrize("form", range(NUM_FORMS))
def test_captions_are_read_back(form: int) -> None:
    for tune in sample_tunes(200, 106):
        wanted = parse_caption(caption(tune, form))
        for name in ATTRIBUTES:
            left_open = form == 3 and name in ("contour", "rhythm")
            assert getattr(wanted, name) == (None if left_open else getattr(tune, name))


def test_captions_written_by_hand() -> None:
    assert parse_caption("a slow sad organ melody in A minor") == WantedTune(
        "organ", "A", "minor", "slow", None, None, "solo"
    )
    assert parse_caption(
        "  A fast  VIOLIN melody in e Flat blues in dotted rhythm over a drone"
    ) == WantedTune("violin", "E flat", "blues", "fast", None, "dotted", "drone")
    assert parse_caption(
        "a moderate calm bell melody in B pentatonic falling over a bass line"
    ) == WantedTune("bell", "B", "pentatonic", "moderate", "falling", None, "bass")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a slow sad kazoo melody in A minor, rising in even rhythm",
        "a slow sad organ melody in H minor, rising in even rhythm",
        "a slow sad organ melody in A, rising in even rhythm",
        "a slow sad organ melody in A minor, rising in even rhythm, please",
        "a slow sad organ melody in A minor, rising in even rhythm over a dog",
        "slow sad organ in A minor",
        "slow and sad: organ tune in A minor",
        "a slow sad organ in A minor melody",
    ],
)
def test_unreadable_captions_are_refused(text: str) -> None:
    refuses(ValueError, "(?s)INSTRUMENT: organ", parse_caption, text)


def test_a_mood_of_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sad in major"):
        parse_caption("a slow sad organ melody in A major, rising in even rhythm")


def _tune(**changes: str) -> Tune:
    words = dict(
        zip(ATTRIBUTES, ("guitar", "D", "minor", "moderate", "arching", "even", "bass"), strict=True)
    )
    return compose(np.random.default_rng(4), **words | changes)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(("instrument", name) for name in INSTRUMENTS if name != "guitar"),
        ("tonic", "E flat"),
        ("tonic", "A"),
        *(("mode", name) for name in ("major", "blues", "pentatonic")),
        *(("tempo", name) for name in ("slow", "fast")),
        *(("contour", name) for name in ("rising", "falling", "dipping", "hovering")),
        *(("rhythm", name) for name in ("dotted", "syncopated", "galloping")),
        *(("backing", name) for name in ("solo", "drone")),
    ],
)
def test_one_wrong_attribute_counts_alone(name: str, word: str) -> None:
    tune = _tune()
    assert all(score(caption(tune), render(tune)).values())
    # Another tune where only this is different, held against the first one's caption and against its own.
    other = _tune(**{name: word})
    assert all(score(caption(other), render(other)).values())
    hits = score(caption(tune), render(other))
    assert {key for key, hit in hits.items() if not hit} == {name}


def test_scores_are_over_what_is_asked_for() -> None:
    tunes, waves = sample_dataset(12, 107)
    hits = score(caption(tunes[0], 3), waves[0])
    assert set(hits) == set(ATTRIBUTES) - {"contour", "rhythm"}
    assert score(tunes[0], waves[0]) == score(caption(tunes[0]), waves[0])
    prompts = [caption(tune, 3 if i % 2 else 0) for i, tune in enumerate(tunes)]
    swapped = np.roll(waves, 1, 0)
    shares = _shares(swapped, prompts)
    assert shares["all_correct"] == 0
    assert sum("rhythm" in score(prompt, wave) for prompt, wave in zip(prompts, swapped, strict=True)) == 6
    # What a wrong clip shares with a prompt counts.
    counts = Counter()
    for i, tune in enumerate(tunes):
        for name in ATTRIBUTES:
            counts[name] += getattr(tune, name) == getattr(tunes[i - 1], name)
    assert shares["instrument"] == counts["instrument"] / 12


def test_facts_that_are_missing_are_wrong() -> None:
    wanted = parse_caption("a slow sad organ melody in A minor, rising in even rhythm")
    assert not any(score_facts(wanted, TuneFacts()).values())
    facts = TuneFacts("organ", "A", "minor", "slow", "rising", "even", "solo")
    assert all(score_facts(wanted, facts).values())
    assert score_facts(wanted, replace(facts, tempo=None))["tempo"] is False


def test_garbage_scores_low() -> None:
    rng = np.random.default_rng(8)
    prompts = sample_tunes(24, 108)
    t = np.arange(NUM_SAMPLES) / SAMPLE_RATE
    silence = [np.zeros(NUM_SAMPLES, np.float32)] * 24
    noise = [rng.normal(0, 0.1, NUM_SAMPLES).astype(np.float32) for _ in prompts]
    hum = [np.sin(2 * np.pi * (200 + 20 * i) * t).astype(np.float32) for i in range(24)]
    assert set(_shares(silence, prompts).values()) == {0.0}
    for waves in (noise, hum):
        shares = _shares(waves, prompts)
        assert shares["all_correct"] == 0 and shares["instrument"] < 0.3
        assert np.mean([shares[name] for name in ATTRIBUTES]) < 0.35
    others = sample_dataset(24, 109)[1]
    shares = _shares(others, prompts)
    assert shares["all_correct"] == 0 and shares["tonic"] < 0.3 and shares["instrument"] < 0.4


def test_clips_of_other_length_and_precision_are_read() -> None:
    tune, wave = _tune(), render(_tune())
    for other in (
        wave.astype(np.float64),
        np.pad(wave, (0, 8_000)),
        np.pad(wave, (1_600, 0)),
        3 * wave,
        0.01 * wave,
    ):
        assert all(score(tune, other).values())


def test_bad_clips_are_refused() -> None:
    good = np.zeros(NUM_SAMPLES, np.float32)
    refuses(TypeError, "NumPy", parse_clip, [0.0] * 10_000)
    refuses(TypeError, "int16", parse_clip, good.astype(np.int16))
    refuses(ValueError, r"shape \[2, 64000\] given", parse_clip, np.stack([good, good]))
    refuses(ValueError, r"shape \[7999\] given", parse_clip, good[:7_999])
    refuses(ValueError, "not finite", parse_clip, np.full(NUM_SAMPLES, np.nan, np.float32))
