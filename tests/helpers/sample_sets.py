"""Sample sets of a tiny pipeline, on disk."""

import json
from pathlib import Path

from tests.helpers.tiny import tiny_pipeline
from visual_spec.eval.quality.prompt_files import PromptSet
from visual_spec.eval.quality.sample_set import SampleSet, sample
from visual_spec.eval.settings import parse_setting
from visual_spec.samplers.core.law import TokenLaw

TEXTS = ("a red circle", "a blue square", "a red square")
LAW = TokenLaw(guidance_scale=2.0)


def work_in(
    folder, *, num=7, batch_size=3, text="autoregressive", prompts=None, seed=0, pipe=None
) -> SampleSet:
    setting = parse_setting(text, LAW, seed)
    return SampleSet(
        pipe or tiny_pipeline(), setting, prompts or PromptSet(TEXTS), Path(folder), num, batch_size, "tiny"
    )


def content(folder):
    """All that a set holds, but for times and locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.startswith(".") and "seconds" not in path.name
    }


def scored(folder, value, **settings):
    """A set with scores as `visual-spec score` writes them."""
    sample(work_in(folder, **settings))
    figure = {"value": value, "low": value - 1, "high": value + 1, "samples": 7, "extractor": "inception"}
    found = {"reference": "true", "figures": {"fid": figure | {"weights": "abc123"}}}
    (folder / "scores").mkdir()
    (folder / "scores" / "scores.json").write_text(json.dumps(found))
    return folder
