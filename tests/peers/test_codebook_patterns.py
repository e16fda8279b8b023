"""The cases of audiocraft's pattern tests, for our `CodebookPattern`.

Restated from facebookresearch/audiocraft, `tests/modules/test_codebooks_patterns.py`: numbers of steps, what they hold,
delays, and sequences built and reverted by loops over a layout. audiocraft's layouts have an empty step more, at the
start, and allow clips of no frames, which ours refuse.
"""

import pytest
import torch

from visual_spec.models.columns.patterns import CodebookPattern

pytestmark = pytest.mark.peers

DELAYS = [[0, 1, 2, 3], [0, 1, 1, 1], [0, 3, 3, 3], [0, 3]]


def providers(codebooks: int) -> dict[str, CodebookPattern]:
    """audiocraft's six, by the names of its classes and their arguments."""
    later = codebooks - 1
    return {
        "parallel": CodebookPattern.parallel(codebooks),
        "delayed 0 1 2": CodebookPattern.delay(range(codebooks)),
        "delayed 0 1 1": CodebookPattern.delay([0] + [1] * later),
        "unrolled": CodebookPattern.flat(codebooks),
        "unrolled 0 1 1": CodebookPattern.flat(codebooks, [0] + [1] * later),
        "unrolled 0 1 1, delays 0 5 5": CodebookPattern.flat(codebooks, [0] + [1] * later, [0] + [5] * later),
    }


@pytest.mark.parametrize("codebooks", [1, 4, 32])
@pytest.mark.parametrize("frames", [1, 16, 100])
def test_number_of_steps(codebooks, frames):
    assert CodebookPattern.parallel(codebooks).steps(frames) == frames
    for delays in (list(range(codebooks)), [0] + [1] * (codebooks - 1), [0] + [4] * (codebooks - 1)):
        assert CodebookPattern.delay(delays).steps(frames) == frames + max(delays)


@pytest.mark.parametrize("flattening", [[0, 1, 2], [0, 1, 1]])
@pytest.mark.parametrize("delays", [[0, 0, 0], [0, 5, 5]])
@pytest.mark.parametrize("frames", [1, 16])
def test_number_of_unrolled_steps(frames, flattening, delays):
    """audiocraft lays out the frames after the clip, too. Ours ends with the last step that holds a code."""
    pattern, levels = CodebookPattern.flat(3, flattening, delays), max(flattening) + 1
    theirs = frames * levels + max(delays)
    assert (
        pattern.steps(frames) == theirs
        if not max(delays)
        else theirs - levels < pattern.steps(frames) <= theirs
    )
    assert pattern.valid(frames)[:, -1].any()


@pytest.mark.parametrize("codebooks", [1, 4, 32])
@pytest.mark.parametrize("frames", [8, 16, 100])
def test_content(codebooks, frames):
    parallel = CodebookPattern.parallel(codebooks).frames_by_step(frames)
    assert torch.equal(parallel, torch.arange(frames).expand(codebooks, -1))
    delayed = CodebookPattern.delay(range(codebooks)).frames_by_step(frames)
    for step in range(delayed.shape[1]):
        for codebook in range(codebooks):
            frame = step - codebook
            assert delayed[codebook, step] == (frame if 0 <= frame < frames else -1)


@pytest.mark.parametrize("frames", [8, 16, 100])
@pytest.mark.parametrize("delays", DELAYS)
def test_delays(frames, delays):
    """The steps that hold all codebooks are all but the delay at either end."""
    whole = CodebookPattern.delay(delays).valid(frames).all(0)
    assert int(whole.sum()) == frames - max(delays)
    assert CodebookPattern.delay(delays).complete_after(frames)[-1] == frames + max(delays)


@pytest.mark.parametrize("codebooks", [1, 4, 32])
@pytest.mark.parametrize("frames", [16, 72])
def test_sequences_are_built_and_reverted(codebooks, frames):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, codebooks, frames), generator=generator)
    for pattern in providers(codebooks).values():
        layout = pattern.frames_by_step(frames).tolist()
        wanted = torch.full((2, codebooks, pattern.steps(frames)), 256)
        for codebook, row in enumerate(layout):
            for step, frame in enumerate(row):
                if frame >= 0:
                    wanted[:, codebook, step] = codes[:, codebook, frame]
        sequence = pattern.apply(codes, 256)
        assert torch.equal(sequence, wanted) and torch.equal(pattern.revert(sequence), codes)
        logits = torch.randn(*sequence.shape, 5, generator=generator)
        back = pattern.revert(logits)
        for codebook, row in enumerate(layout):
            for step, frame in enumerate(row):
                if frame >= 0:
                    assert torch.equal(back[:, codebook, frame], logits[:, codebook, step])
        for wrong in {0, codebooks - 1, codebooks + 1} - {codebooks}:
            with pytest.raises(ValueError, match=f"{wrong}, {frames}"):
                pattern.apply(torch.zeros(2, wrong, frames, dtype=torch.long), 256)
