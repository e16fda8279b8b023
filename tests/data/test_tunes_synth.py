"""The sound of tunes, by Fourier sums of the test's own: pitches, partials, timing, decay, level and room."""

import numpy as np
import pytest

from tests.helpers.refusals import refuses
from visual_spec.data.tunes import FRAME, INSTRUMENTS, NUM_SAMPLES, SAMPLE_RATE, Note, Tune, sample_tunes
from visual_spec.data.tunes_synth import VOICES, note_wave, render


def _hertz(pitch: int) -> float:
    return 27.5 * 2 ** ((pitch - 21) / 12)  # from A0, an 88-key piano's lowest


def _strength(wave: np.ndarray, hertz: np.ndarray) -> np.ndarray:
    """Magnitude of a wave at given frequencies, by one Fourier sum each, Hann-windowed."""
    seconds = np.arange(len(wave)) / SAMPLE_RATE
    shape = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(len(wave)) / len(wave))
    return np.abs(np.exp(-2j * np.pi * np.outer(hertz, seconds)) @ (wave * shape)) * 2 / shape.sum()


def _clip(instrument: str, *notes: Note, backing: str = "solo", bass: tuple[Note, ...] = ()) -> np.ndarray:
    return render(Tune(instrument, "C", "major", "slow", "rising", "even", backing, 10, notes, bass))


def test_rendering_is_deterministic_and_within_bounds() -> None:
    for tune in sample_tunes(40, 1):
        wave = render(tune)
        assert wave.shape == (NUM_SAMPLES,) and wave.dtype == np.float32
        assert np.abs(wave).max() <= 0.99 and np.array_equal(wave, render(tune))
        loudness = np.sqrt(np.mean(wave**2))
        assert 0.03 < loudness < 0.2


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_notes_have_their_pitches(instrument: str) -> None:
    """Every note of some length is stronger at its own pitch than anywhere within three semitones."""
    checked = 0
    for tune in sample_tunes(150, 2):
        if tune.instrument != instrument or checked > 60:
            continue
        wave = render(tune)
        for note in tune.notes:
            if note.length < 12:
                continue
            # Beyond the room's answer to the note before; the vibrato takes a moment to set in.
            part = wave[note.start * FRAME + 800 : note.start * FRAME + 800 + 2_400].astype(float)
            around = _hertz(note.pitch) * 2 ** (np.array([-3, -2, -1, -0.5, 0, 0.5, 1, 2, 3]) / 12)
            assert _strength(part, around).argmax() == 4, (tune, note)
            checked += 1
    assert checked > 30


PARTIALS = {
    "organ": [1, 2, 3, 4, 6, 8],
    "flute": [1, 2, 3],
    "violin": [1, 2, 3, 4, 5, 6, 7],
    "trumpet": [1, 2, 3, 4, 5],
    "guitar": [1, 2, 3],
    "marimba": [1, 4],
    "bell": [1, 2, 2.76, 4.07, 5.4],
    "synth": [1, 3, 5, 7, 9],
}


@pytest.mark.parametrize("pitch", [57, 69, 80])
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_instruments_have_their_partials(instrument: str, pitch: int) -> None:
    wave = note_wave(instrument, pitch)[:2_400].astype(float)
    hertz = _hertz(pitch)
    expected = np.array([r for r in PARTIALS[instrument] if r * hertz < 7_000], float)
    found = _strength(wave, expected * hertz)
    assert (found > 0.02 * found.max()).all()
    # In tune to 5 cents, before any vibrato sets in.
    cents = np.arange(-50, 51, 2.5)
    assert (
        abs(
            cents[
                _strength(
                    note_wave(instrument, pitch)[:1_920].astype(float), hertz * 2 ** (cents / 1_200)
                ).argmax()
            ]
        )
        <= 5
    )
    # Half way between harmonics there is nothing; a bell has its own places.
    gaps = np.array([1.5, 2.4, 3.5]) if instrument == "bell" else np.arange(1.5, 8)
    assert (_strength(wave, gaps * hertz) < 0.03 * found.max()).all()
    if instrument == "synth":
        assert (_strength(wave, np.array([2.0, 4.0, 6.0]) * hertz) < 0.01 * found[0]).all()
        _check_square_wave(pitch)


def _check_square_wave(pitch: int) -> None:
    """After the attack a note is a sum of odd harmonics k at levels 1 / k below 7.4 kHz, all 60 dB down after 4 s.

    A least-squares fit of these partials, of any phase, finds their levels. What remains is rounding to float32.
    """
    start, end = 200, 2_600  # samples; the attack takes 64
    seconds = np.arange(start, end) / SAMPLE_RATE
    orders = np.arange(1, 7_400 / _hertz(pitch), 2)
    phases = 2 * np.pi * _hertz(pitch) * np.outer(seconds, orders)
    parts = np.concatenate([np.sin(phases), np.cos(phases)], 1) * 10 ** (-3 * seconds[:, None] / 4.0)
    wave = note_wave("synth", pitch)[start:end].astype(float)
    fitted, *_ = np.linalg.lstsq(parts, wave, rcond=None)
    levels = np.hypot(*np.split(fitted, 2))
    np.testing.assert_allclose(levels / levels[0], 1 / orders, rtol=5e-6)
    assert np.abs(wave - parts @ fitted).max() < 5e-6


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_no_partial_is_folded_back(instrument: str) -> None:
    wave = note_wave(instrument, 83)[: 2**14].astype(float)
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2
    hertz = np.fft.rfftfreq(len(wave), 1 / SAMPLE_RATE)
    assert power[hertz > 7_700].sum() < 1e-6 * power.sum()
    assert power[hertz < 0.9 * _hertz(83)].sum() < 1e-3 * power.sum()


@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_notes_begin_when_they_should(instrument: str) -> None:
    notes = [Note(start, 30, pitch, 1.0) for start, pitch in [(2, 60), (70, 67), (130, 72)]]
    wave = _clip(instrument, *notes)
    # The convolution of the room reaches every sample, by rounding.
    assert np.abs(wave[: 2 * FRAME]).max() < 1e-6
    for note in notes:
        before = wave[note.start * FRAME - 160 : note.start * FRAME]
        after = wave[note.start * FRAME : note.start * FRAME + 960]
        assert np.sqrt(np.mean(after**2)) > 20 * np.sqrt(np.mean(before**2)) + 0.01


def test_what_is_struck_dies_away_and_what_is_blown_does_not() -> None:
    fade = {}
    for instrument in INSTRUMENTS:
        wave = _clip(instrument, Note(2, 60, 69, 1.0)).astype(float)
        early, late = (np.sqrt(np.mean(wave[start : start + 1_600] ** 2)) for start in (3_200, 12_800))
        fade[instrument] = 20 * np.log10(late / early)
    for instrument in ("organ", "flute", "violin", "trumpet"):
        assert abs(fade[instrument]) < 2
    assert -12 < fade["synth"] < -4
    assert -30 < fade["guitar"] < -15 and -30 < fade["bell"] < -10
    assert fade["marimba"] < -40


def test_instruments_are_equally_loud() -> None:
    for instrument in INSTRUMENTS:
        wave = note_wave(instrument, 66)
        assert np.sqrt(np.mean(wave[:3_200].astype(float) ** 2)) == pytest.approx(1, rel=1e-3)


def test_velocity_is_loudness() -> None:
    loud, soft = (_clip("violin", Note(2, 40, 64, velocity)) for velocity in (1.0, 0.5))
    np.testing.assert_allclose(soft, loud / 2, atol=1e-6)


def test_a_clip_is_the_sum_of_its_notes() -> None:
    first, second, low = Note(2, 40, 60, 0.9), Note(42, 50, 64, 0.8), Note(2, 60, 41, 1.0)
    together = _clip("flute", first, second, backing="bass", bass=(low,))
    alone = [_clip("flute", first), _clip("flute", second), _clip("flute", backing="bass", bass=(low,))]
    np.testing.assert_allclose(together, sum(alone), atol=1e-5)
    assert min(np.abs(part).max() for part in alone) > 0.05


def test_the_room_answers_and_the_end_is_silent() -> None:
    wave = _clip("organ", Note(2, 40, 69, 1.0))
    tail = wave[42 * FRAME : 42 * FRAME + 3_200]  # the note is silent from 95 % of its length on
    level = np.sqrt(np.mean(tail**2)) / np.sqrt(np.mean(wave[: 42 * FRAME] ** 2))
    assert 0.003 < level < 0.15
    assert np.abs(_clip("organ", Note(2, 40, 69, 1.0))[48 * FRAME + 8_000 :]).max() < 1e-4
    assert np.abs(_clip("organ", Note(150, 50, 69, 1.0))[-8:]).max() < 1e-4  # no click at the cut


@pytest.mark.parametrize("backing", ["drone", "bass"])
def test_the_bass_is_low_and_below_the_melody(backing: str) -> None:
    for pitch in (40, 46, 51):
        wave = _clip("flute", backing=backing, bass=(Note(2, 150, pitch, 1.0),))
        part = wave[8_000:24_000].astype(float)
        around = _hertz(pitch) * 2 ** (np.arange(-3, 4) / 12)
        assert _strength(part, around).argmax() == 3
        spectrum = np.abs(np.fft.rfft(part)) ** 2
        assert spectrum[np.fft.rfftfreq(len(part), 1 / SAMPLE_RATE) > 175].sum() < 0.1 * spectrum.sum()


def test_unknown_instruments_are_refused() -> None:
    refuses(ValueError, "'kazoo'", _clip, "kazoo", Note(2, 10, 60, 1.0))
    assert set(INSTRUMENTS) | {"bass", "drone"} == set(VOICES)


def test_kept_waves_cannot_be_spoilt() -> None:
    with pytest.raises(ValueError, match="read-only"):
        note_wave("organ", 60)[:10] *= 2
