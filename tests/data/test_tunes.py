"""The composer of tunes: determinism, captions, the held-out split, and melodies that are what their captions say."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.refusals import refuses
from visual_spec.data.tunes import (
    ATTRIBUTES,
    FRAME,
    MODES,
    MOODS,
    NUM_FORMS,
    NUM_FRAMES,
    NUM_SAMPLES,
    RHYTHMS,
    SAMPLE_RATE,
    TEMPI,
    TONICS,
    VOCABULARY,
    Tune,
    caption,
    compose,
    fit_contour,
    held_out_prompts,
    is_held_out,
    sample_tune,
    sample_tunes,
)
from visual_spec.data.tunes_synth import sample_dataset


def _attributes(tune: Tune) -> tuple[str, ...]:
    return tuple(getattr(tune, name) for name in ATTRIBUTES)


def test_clips_are_whole_codec_steps_of_at_least_four_seconds() -> None:
    assert NUM_SAMPLES == NUM_FRAMES * FRAME and NUM_SAMPLES >= 4 * SAMPLE_RATE
    assert SAMPLE_RATE / FRAME == 50


def test_sampling_is_deterministic() -> None:
    assert sample_tunes(40, 3) == sample_tunes(40, 3) != sample_tunes(40, 4)
    first, second = sample_dataset(4, 3), sample_dataset(4, 3)
    assert first[0] == second[0] == sample_tunes(4, 3) and np.array_equal(first[1], second[1])
    assert first[1].shape == (4, NUM_SAMPLES) and first[1].dtype == np.float32
    assert not np.array_equal(first[1], sample_dataset(4, 4)[1])
    assert sample_dataset(0, 0)[1].shape == (0, NUM_SAMPLES)
    assert held_out_prompts(10, 5) == held_out_prompts(10, 5) != held_out_prompts(10, 6)


def test_held_out_combinations_are_disjoint() -> None:
    seen, unseen = sample_tunes(100, 0), sample_tunes(100, 0, held_out=True)
    assert not {_attributes(tune) for tune in seen} & {_attributes(tune) for tune in unseen}
    assert not any(map(is_held_out, seen)) and all(map(is_held_out, unseen))
    for form in range(3):  # the form that leaves attributes open says the same of many tunes
        assert not {caption(tune, form) for tune in seen} & {caption(tune, form) for tune in unseen}
    assert held_out_prompts(20, 7) == [caption(tune) for tune in sample_tunes(20, 7, held_out=True)]
    rng = np.random.default_rng(1)
    share = np.mean([is_held_out(sample_tune(rng)) for _ in range(1200)])
    assert 0.07 < share < 0.135  # 26 of 256 hashes
    # Whether a tune is held out hangs on its attributes alone.
    tune = seen[0]
    again = compose(np.random.default_rng(9), **{name: getattr(tune, name) for name in ATTRIBUTES})
    assert again.notes != tune.notes and is_held_out(again) == is_held_out(tune)


def test_captions() -> None:
    rng = np.random.default_rng(0)
    words = ("organ", "A", "minor", "slow", "rising", "even", "solo")
    tune = compose(rng, **dict(zip(ATTRIBUTES, words, strict=True)))
    assert [caption(tune, form) for form in range(NUM_FORMS)] == [
        "a slow sad organ melody in A minor, rising in even rhythm",
        "slow and sad: organ tune in A minor, even and rising",
        "slow sad music in A minor for organ, rising in even rhythm",
        "a slow sad organ melody in A minor",
    ]
    other = replace(tune, tonic="F sharp", mode="blues", backing="bass")
    assert (
        caption(other) == "a slow cool organ melody in F sharp blues, rising in even rhythm over a bass line"
    )
    assert caption(replace(tune, backing="drone"), 3) == "a slow sad organ melody in A minor over a drone"
    assert (
        caption(other, 2)
        == "slow cool music in F sharp blues for organ over a bass line, rising in even rhythm"
    )
    for form in (-1, NUM_FORMS):
        refuses(ValueError, f"form {form} given", caption, tune, form)


def test_captions_fit_the_text_encoder() -> None:
    words = [caption(tune, form).split() for tune in sample_tunes(300, 2) for form in range(NUM_FORMS)]
    assert max(map(len, words)) <= 20
    assert 40 <= len({word.strip(",:").lower() for text in words for word in text}) <= 60


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    known = {name: words[0] for name, words in VOCABULARY.items()}
    for name, words in VOCABULARY.items():
        with pytest.raises(ValueError, match=f"unknown {name} 'purple'.*{words[0]}"):
            compose(np.random.default_rng(0), **{**known, name: "purple"})


def test_attributes_are_drawn_evenly() -> None:
    rng = np.random.default_rng(5)
    tunes = [sample_tune(rng) for _ in range(1200)]
    for name, words in VOCABULARY.items():
        counts = Counter(getattr(tune, name) for tune in tunes)
        shares = {word: 1 / len(words) for word in words}
        if name == "backing":
            shares = {"solo": 0.5, "drone": 0.25, "bass": 0.25}
        for word, share in shares.items():
            assert abs(counts[word] / len(tunes) - share) < 4 * np.sqrt(share * (1 - share) / len(tunes))
    for tempo, units in TEMPI.items():
        assert {tune.unit for tune in tunes if tune.tempo == tempo} == set(units)


def _contour(pitches: np.ndarray, times: np.ndarray) -> str:
    """A contour by the means over the outer quarters and the middle half of the time: not the definition used."""
    along = (times - times[0]) / (times[-1] - times[0])
    first, last = pitches[along < 0.25].mean(), pitches[along > 0.75].mean()
    middle = pitches[(along > 0.3) & (along < 0.7)].mean()
    if abs(middle - (first + last) / 2) > 3.3:
        return "arching" if middle > first else "dipping"
    if abs(last - first) > 5.5:
        return "rising" if last > first else "falling"
    return "hovering"


def test_melodies_are_what_their_captions_say() -> None:
    contours = 0
    tunes = sample_tunes(300, 6)
    for tune in tunes:
        pitches = np.array([note.pitch for note in tune.notes])
        starts = np.array([note.start for note in tune.notes])
        tonic = TONICS[tune.tonic]
        # Key and mode: the tonic at both ends, every note in the scale, and in no other scale of the tonic.
        assert pitches[0] % 12 == pitches[-1] % 12 == tonic
        tones = set(((pitches - tonic) % 12).tolist())
        fitting = {name for name, scale in MODES.items() if tones <= set(scale)}
        assert fitting == ({"major", "pentatonic"} if tune.mode == "pentatonic" else {tune.mode})
        # Tempo and rhythm: onsets on the grid of sixteenth notes, whole bars, and the last note at the head of one.
        sixteenths, rest = np.divmod(starts - starts[0], tune.unit)
        assert not rest.any() and sixteenths[-1] % 8 == 0
        gaps = np.diff(sixteenths).tolist()
        pattern = list(RHYTHMS[tune.rhythm])
        assert gaps == pattern * (len(gaps) // len(pattern)) and len(gaps) >= 6
        assert tune.unit in TEMPI[tune.tempo] and tune.beats_per_minute == pytest.approx(750 / tune.unit)
        # Notes fill the time between onsets, and the clip holds the last one.
        assert all(a.start + a.length == b.start for a, b in zip(tune.notes, tune.notes[1:], strict=False))
        assert starts[0] == 2 and NUM_FRAMES >= tune.notes[-1].start + tune.notes[-1].length
        assert tune.notes[-1].length >= 20
        assert 54 <= pitches.min() and pitches.max() <= 84
        assert np.abs(np.diff(pitches)).max() <= 9
        assert all(0.6 < note.velocity <= 1 for note in tune.notes)
        contours += _contour(pitches, starts) == tune.contour
    assert contours >= 0.97 * len(tunes)


def test_slow_moderate_and_fast_are_apart() -> None:
    speeds = {name: sorted(750 / unit for unit in units) for name, units in TEMPI.items()}
    assert speeds["slow"][-1] * 1.2 < speeds["moderate"][0] < speeds["moderate"][-1] * 1.2 < speeds["fast"][0]
    assert 60 < speeds["slow"][0] and speeds["fast"][-1] < 190


def test_what_sounds_below() -> None:
    for tune in sample_tunes(300, 8):
        tonic = TONICS[tune.tonic]
        if tune.backing == "solo":
            assert not tune.bass
            continue
        assert all(40 <= note.pitch <= 51 for note in tune.bass)
        assert tune.bass[-1].pitch % 12 == tonic
        if tune.backing == "drone":
            assert [(note.start, note.length) for note in tune.bass] == [(0, NUM_FRAMES)]
            continue
        starts = [note.start for note in tune.bass]
        assert set(np.diff(starts).tolist()) == {4 * tune.unit}  # one on each beat
        assert starts[0] == tune.notes[0].start and starts[-1] == tune.notes[-1].start
        assert all((note.pitch - tonic) % 12 in MODES[tune.mode] for note in tune.bass)


def test_the_fitted_contour_is_that_of_lines_and_tents() -> None:
    times = np.array([0.0, 1.0, 2.5, 4.0, 7.0, 8.0])
    along = times / 8
    tent = np.minimum(along, 1 - along) * 2
    rise, height = fit_contour(times, np.stack([60 + 12 * along, 70 - 9 * tent, 50 + 3 * along + 5 * tent]))
    np.testing.assert_allclose(rise, [12, 0, 3], atol=1e-9)
    np.testing.assert_allclose(height, [0, -9, 5], atol=1e-9)


def test_every_combination_can_be_composed() -> None:
    rng = np.random.default_rng(0)
    for mode in MODES:
        assert MOODS[mode] in caption(
            compose(rng, **{**{name: words[-1] for name, words in VOCABULARY.items()}, "mode": mode})
        )
        for contour, rhythm, tempo in itertools.product(VOCABULARY["contour"], RHYTHMS, TEMPI):
            words = ("bell", "E flat", mode, tempo, contour, rhythm, "bass")
            tune = compose(rng, **dict(zip(ATTRIBUTES, words, strict=True)))
            assert _attributes(tune) == words
