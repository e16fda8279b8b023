"""The undamaged pipelines, checkpoints and samples that malformed ones are made of."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.official import add_tiny_presets, write_class_model, write_tokenizer
from tests.helpers.sample_sets import scored
from tests.helpers.tiny import tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from tests.helpers.tiny_scales import tiny_scale_pipeline
from visual_spec import cli
from visual_spec.pipelines.convert import convert

PROMPTS = {"pictures": "a red circle", "scales": "3", "music": "a slow sad organ"}
MAKE = {"pictures": tiny_pipeline, "scales": tiny_scale_pipeline, "music": tiny_audio_pipeline}


class Ground:
    """The undamaged things, made once in a folder.

    Args:
        patch: makes the tiny official sizes known.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        add_tiny_presets(patch)
        for name, make in MAKE.items():
            make().save_pretrained(folder / name)
        official = folder / "official"
        official.mkdir()
        self.files = [write_class_model(official), write_tokenizer(official)]
        self.legacy = official / "vq_tiny_legacy.pt"
        torch.save(torch.load(self.files[1]), self.legacy, _use_new_zipfile_serialization=False)
        convert(self.files, folder / "converted", image_size=8)
        self.drafter = folder / "drafter"
        shutil.copytree(folder / "pictures" / "transformer", self.drafter)
        self.latents, self.drawn = folder / "latents", folder / "drawn"
        tiny_latent_pipeline().save_pretrained(self.latents)
        scored(self.drawn, 10.0)

    def output(self, kind: str) -> bytes:
        """What the undamaged pipeline makes."""
        out = self.folder / f"out-{kind}"
        if not out.exists():
            assert cli.main(generate(kind, self.folder / kind, out)) == 0
        return next(out.glob("000-*")).read_bytes()


def generate(kind: str, model: Path | str, out: Path, *more: str) -> list[str]:
    """The command that makes one sample."""
    return ["generate", PROMPTS[kind], "--model", str(model), "--out", str(out), "--device", "cpu", *more]


def copied(ground: Ground, kind: str, folder: Path) -> Path:
    return Path(shutil.copytree(ground.folder / kind, folder / "model"))
