"""`tunes`: procedural captioned melodies of 4 s at 16 kHz with exact ground truth.

A tune is one melody for one instrument, alone or over a drone or a bass line. Its caption states everything that a
listener could check: instrument, key, mode, tempo, contour, rhythm and backing. Notes begin on a grid of 20 ms, one
step of the embedded codec, and the same note always has the same wave (`visual_spec.data.tunes_synth`), so that a small
model can learn them. Generated clips are scored by parsing them, `visual_spec.data.tunes_parser`.

A melody repeats a motif along the line of its contour, moves mostly by step, and rests on chord tones at the start of a
bar (I, IV and V in turn). It begins and ends on the tonic, and holds the tones that distinguish its mode from others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visual_spec.data import splits

SAMPLE_RATE = 16_000
FRAME = 320  # samples of one step of the codec, 50 per second; every note begins on one
NUM_FRAMES = 200
NUM_SAMPLES = NUM_FRAMES * FRAME

INSTRUMENTS = ("organ", "flute", "violin", "trumpet", "guitar", "marimba", "bell", "synth")
TONICS: dict[str, int] = {  # semitones above C
    "C": 0,
    "C sharp": 1,
    "D": 2,
    "E flat": 3,
    "E": 4,
    "F": 5,
    "F sharp": 6,
    "G": 7,
    "A flat": 8,
    "A": 9,
    "B flat": 10,
    "B": 11,
}
MODES: dict[str, tuple[int, ...]] = {  # semitones above the tonic
    "major": (0, 2, 4, 5, 7, 9, 11),
    "minor": (0, 2, 3, 5, 7, 8, 10),
    "pentatonic": (0, 2, 4, 7, 9),
    "blues": (0, 3, 5, 6, 7, 10),
}
MOODS = {"major": "happy", "minor": "sad", "pentatonic": "calm", "blues": "cool"}
# Codec steps of a sixteenth note: 68 or 75 beats a minute, 94 or 107, 150 or 188.
TEMPI: dict[str, tuple[int, ...]] = {"slow": (11, 10), "moderate": (8, 7), "fast": (5, 4)}
CONTOURS = ("rising", "falling", "arching", "dipping", "hovering")
RHYTHMS: dict[str, tuple[int, ...]] = {  # sixteenth notes of each note of a bar of two beats
    "even": (2, 2, 2, 2),
    "dotted": (3, 1, 3, 1),
    "syncopated": (3, 3, 2),
    "galloping": (2, 1, 1, 2, 1, 1),
}
BACKINGS = ("solo", "drone", "bass")

VOCABULARY: dict[str, tuple[str, ...]] = {
    "instrument": INSTRUMENTS,
    "tonic": tuple(TONICS),
    "mode": tuple(MODES),
    "tempo": tuple(TEMPI),
    "contour": CONTOURS,
    "rhythm": tuple(RHYTHMS),
    "backing": BACKINGS,
}
ATTRIBUTES = tuple(VOCABULARY)

BAR = 8  # sixteenth notes
FIRST_FRAME = 2  # of the first note: a note that begins at once has no audible attack
_ENDING = 20  # least steps of the last note
_LOWEST_TONIC = 57  # MIDI number (A4 = 69 = 440 Hz); the tonics are 57 to 68, and an octave higher
_LOWEST_BASS = 40
# Least share of a melody's notes outside every other mode; major contains all tones of the pentatonic.
_TELLING = 1 / 8
# Steps that a hovering melody goes below and above the tonic, by number of tones in the scale.
_HOVER = {5: (-2, 3), 6: (-2, 4), 7: (-3, 4)}
_TRIES = 64  # melodies drawn at once; the first clear one is used
_CHORDS = {2: "IV", 3: "I4V", 4: "I4IV", 5: "I4I4V"}  # one letter a bar; 4 is IV
_BASS_TONES = {"I": (0, 7), "4": (5, 0), "V": (7, 7)}  # of the two beats, semitones above the tonic
_ROOT_STEPS = {"I": 0, "4": 3, "V": 4}  # in a scale of seven tones


@dataclass(frozen=True)
class Note:
    """One note. `start`, `length`: codec steps until the next one begins; `pitch`: MIDI number; `velocity`: 0 to 1."""

    start: int
    length: int
    pitch: int
    velocity: float


@dataclass(frozen=True)
class Tune:
    """A clip's ground truth. `unit`: codec steps of a sixteenth note; `bass`: notes of the drone or the bass line."""

    instrument: str
    tonic: str
    mode: str
    tempo: str
    contour: str
    rhythm: str
    backing: str
    unit: int
    notes: tuple[Note, ...]
    bass: tuple[Note, ...] = ()

    @property
    def beats_per_minute(self) -> float:
        """Beats per minute; a beat is four sixteenth notes."""
        return 60 * SAMPLE_RATE / (4 * self.unit * FRAME)


BACKING_PHRASES = {"solo": "", "drone": " over a drone", "bass": " over a bass line"}
_TEMPLATES = (
    "a {tempo} {mood} {instrument} melody in {tonic} {mode}, {contour} in {rhythm} rhythm{backing}",
    "{tempo} and {mood}: {instrument} tune in {tonic} {mode}, {rhythm} and {contour}{backing}",
    "{tempo} {mood} music in {tonic} {mode} for {instrument}{backing}, {contour} in {rhythm} rhythm",
    "a {tempo} {mood} {instrument} melody in {tonic} {mode}{backing}",
)
NUM_FORMS = len(_TEMPLATES)


def caption(tune: Tune, form: int = 0) -> str:
    """Return the English caption of a tune in one of `NUM_FORMS` forms; form 0 is the usual one, form 3 the shortest.

    The mood follows from the mode. Form 3 omits contour and rhythm.

    Raises:
        ValueError: `form` is not in 0 <= form < NUM_FORMS.
    """
    if not 0 <= form < NUM_FORMS:
        raise ValueError(f"form {form} given; pass 0 to {NUM_FORMS - 1}")
    words = {name: getattr(tune, name) for name in ATTRIBUTES}
    words["backing"] = BACKING_PHRASES[tune.backing]
    return _TEMPLATES[form].format(mood=MOODS[tune.mode], **words)


def is_held_out(tune: Tune) -> bool:
    """Return whether a tune's attributes are in the held-out tenth of all combinations, which no trainer uses."""
    return splits.is_held_out(caption(tune))


def sample_tune(rng: np.random.Generator) -> Tune:
    """Draw a tune: all attributes uniformly, but half of the tunes have no backing."""
    return compose(
        rng,
        instrument=str(rng.choice(INSTRUMENTS)),
        tonic=str(rng.choice(list(TONICS))),
        mode=str(rng.choice(list(MODES))),
        tempo=str(rng.choice(list(TEMPI))),
        contour=str(rng.choice(CONTOURS)),
        rhythm=str(rng.choice(list(RHYTHMS))),
        backing=str(rng.choice(BACKINGS, p=[0.5, 0.25, 0.25])),
    )


def sample_tunes(count: int, seed: int, *, held_out: bool = False) -> list[Tune]:
    """Return tunes with attributes all inside or all outside the held-out tenth (`is_held_out`)."""
    return splits.sample_part(sample_tune, is_held_out, count, seed, held_out)


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return captions of held-out tunes."""
    return [caption(tune) for tune in sample_tunes(count, seed, held_out=True)]


def compose(
    rng: np.random.Generator,
    *,
    instrument: str,
    tonic: str,
    mode: str,
    tempo: str,
    contour: str,
    rhythm: str,
    backing: str,
) -> Tune:
    """Return a tune with given attributes, which are known words (ValueError); `rng` draws the notes."""
    attributes = (instrument, tonic, mode, tempo, contour, rhythm, backing)
    for value, (name, words) in zip(attributes, VOCABULARY.items(), strict=True):
        if value not in words:
            raise ValueError(f"unknown {name} {value!r}; allowed: {', '.join(words)}")
    unit = int(rng.choice(TEMPI[tempo]))
    num_bars = (NUM_FRAMES - FIRST_FRAME - _ENDING) // (BAR * unit)
    # Onsets in sixteenth notes; the last note begins where the next bar would begin.
    within = np.cumsum((0, *RHYTHMS[rhythm][:-1]))
    onsets = np.append(np.add.outer(BAR * np.arange(num_bars), within).ravel(), BAR * num_bars)
    root = _LOWEST_TONIC + (TONICS[tonic] - _LOWEST_TONIC) % 12
    if contour == "hovering" and root < _LOWEST_TONIC + 6:
        root += 12  # in the middle of the other contours' range
    chords = _CHORDS[num_bars]
    clear: list[np.ndarray] = []
    while not clear:
        tones = _draw_melodies(rng, mode, contour, onsets, len(within), chords)
        clear = list(tones[_are_clear(tones, mode, contour, onsets)])
    notes = _make_notes(onsets, root + clear[0], unit)
    return Tune(
        instrument,
        tonic,
        mode,
        tempo,
        contour,
        rhythm,
        backing,
        unit,
        notes,
        _make_bass(backing, TONICS[tonic], mode, chords, unit),
    )


def _draw_melodies(
    rng: np.random.Generator, mode: str, contour: str, onsets: np.ndarray, per_bar: int, chords: str
) -> np.ndarray:
    """Draw semitones above the tonic `[_TRIES, N]`: each row a motif along the contour's line, in scale steps."""
    scale = np.array(MODES[mode])
    count, octave = len(onsets), len(scale)
    along = onsets / onsets[-1]
    hill = np.minimum(1.1, 1.4 * (1 - np.abs(2 * along - 1)))
    line = {
        "rising": along,
        "falling": 1 - along,
        "arching": hill,
        "dipping": 1 - hill,
        "hovering": np.zeros(count),
    }[contour]
    # Steps by which the motif leaves the line; they are wider in scales with fewer tones.
    widest = 2 if octave == 7 else 1
    low, high = _HOVER[octave] if contour == "hovering" else (-widest, widest)
    motif = rng.integers(low, high + 1, (_TRIES, per_bar))
    motif[:, 0] = 0
    # Every other bar may turn the motif upside down.
    turns = np.where(np.arange(count) // per_bar % 2 == 1, rng.choice([-1, 1], (_TRIES, 1)), 1)
    steps = np.rint(line * octave).astype(int) + turns * motif[:, np.arange(count) % per_bar]
    steps += rng.integers(-1, 2, steps.shape) * (rng.random(steps.shape) < 0.2)
    if octave == 7:  # the first note of a bar moves to a chord tone, which is never far
        for bar, chord in enumerate(chords):
            degrees = (steps[:, bar * per_bar] - _ROOT_STEPS[chord]) % 7
            steps[:, bar * per_bar] += np.array([0, -1, 0, -1, 0, -1, 1])[degrees]
    ends = {"rising": (0, octave), "falling": (octave, 0), "dipping": (octave, octave)}
    steps[:, 0], steps[:, -1] = ends.get(contour, (0, 0))
    steps[:, -2] = steps[:, -1] + rng.choice([-1, 1], _TRIES)  # leads into the tonic
    steps = np.clip(steps, *(_HOVER[octave] if contour == "hovering" else (-1, octave + 1)))
    return 12 * (steps // octave) + scale[steps % octave]


def _are_clear(tones: np.ndarray, mode: str, contour: str, onsets: np.ndarray) -> np.ndarray:
    """Return which melodies `[_TRIES, N]` show their mode and contour, and can be sung: no wide leap, few repeats."""
    clear = np.ones(len(tones), bool)
    for other in MODES.values():
        if not set(MODES[mode]) <= set(other):
            clear &= (~np.isin(tones % 12, other)).mean(1) >= _TELLING
    leaps = np.abs(np.diff(tones))
    clear &= (leaps.max(1) <= 9) & (leaps.mean(1) <= 5) & ((leaps == 0).mean(1) <= 0.2)
    rise, height = fit_contour(onsets, tones)
    if contour in ("rising", "falling"):
        return clear & (rise * (1 if contour == "rising" else -1) > 9) & (np.abs(height) < 3)
    if contour in ("arching", "dipping"):
        return clear & (height * (1 if contour == "arching" else -1) > 8) & (np.abs(rise) < 4)
    return clear & (np.abs(rise) < 2.5) & (np.abs(height) < 2.5)


def fit_contour(times: np.ndarray, pitches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return by how many semitones melodies `[..., N]` rise from end to end, and peak in the middle: `[...]` each.

    A line and a tent are fitted to the pitches at the times `[N]` by least squares.
    """
    along = (times - times[0]) / (times[-1] - times[0])
    design = np.stack([np.ones_like(along), along - 0.5, 1 - np.abs(2 * along - 1)], 1)
    fit = pitches @ np.linalg.pinv(design).T
    return fit[..., 1], fit[..., 2]


def _make_notes(onsets: np.ndarray, pitches: np.ndarray, unit: int) -> tuple[Note, ...]:
    starts = FIRST_FRAME + unit * onsets
    end = min(int(starts[-1]) + BAR * unit, NUM_FRAMES)
    lengths = np.diff(np.append(starts, end))
    accents = np.select([onsets % BAR == 0, onsets % (BAR // 2) == 0], [1.0, 0.9], 0.8)
    swell = 0.88 + 0.12 * np.sin(np.pi * onsets / onsets[-1])
    return tuple(
        Note(int(start), int(length), int(pitch), float(velocity))
        for start, length, pitch, velocity in zip(starts, lengths, pitches, accents * swell, strict=True)
    )


def _make_bass(backing: str, tonic: int, mode: str, chords: str, unit: int) -> tuple[Note, ...]:
    def pitch(tone: int) -> int:
        return _LOWEST_BASS + (tonic + tone - _LOWEST_BASS) % 12

    if backing == "solo":
        return ()
    if backing == "drone":
        return (Note(0, NUM_FRAMES, pitch(0), 1.0),)
    beat, notes = BAR // 2 * unit, []
    for chord in chords:
        tones = _BASS_TONES[chord]
        if chord == "4" and 5 not in MODES[mode]:
            tones = (9, 9)  # the pentatonic has no fourth
        for tone in tones:
            notes.append(Note(FIRST_FRAME + len(notes) * beat, beat, pitch(tone), 0.9))
    last = FIRST_FRAME + len(notes) * beat
    return (*notes, Note(last, min(2 * beat, NUM_FRAMES - last), pitch(0), 1.0))
