"""Emu3, Janus and GLM-Image through vLLM, tiny and random: tokens of `visual_spec.accelerate` for the same seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.refusals import refuses
from tests.models.next_token import tiny_transformers as tiny
from tests.serving.servers import CPU, NEEDS_VLLM
from visual_spec.serving.vllm.token_models import ModelPrompts, save_model_for_vllm

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.serving.token_models", *arguments]
    env = os.environ | CPU | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "weights")])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(bool(NEEDS_VLLM), reason=NEEDS_VLLM)
@pytest.mark.parametrize(
    ("name", "guided", "window", "runner"),
    [
        ("emu3", 1, 8, "first"),
        ("emu3", 1, 1, "first"),
        ("emu3", 0, 8, "first transformers"),
        ("emu3", 1, 8, "second"),
        ("janus", 1, 8, "first"),
        ("janus", 0, 1, "first"),
        ("glm_image", 0, 8, "first"),
        ("glm_image", 0, 1, "first"),
        ("glm_image", 0, 8, "second"),
    ],
)
def test_served_tokens_are_those_of_the_accelerated_model(name, guided, window, runner, tmp_path):
    """Prompts of different lengths in one batch; row ends of Emu3, both grids of GLM-Image; by both runners."""
    facts = run(str(tmp_path), name, str(guided), str(window), *runner.split())
    assert facts["equal"] == [True] * 3 and facts["different"] == 3 and facts["codes"] > 3
    ahead = runner == "second"  # it schedules a call ahead
    if window > 1:
        # Row ends take places of a window, and are kept. So calls are about those of the adapter for the slowest.
        assert facts["calls"] < facts["places"] and facts["calls"] <= facts["most"] + 2
    else:
        assert 0 <= facts["calls"] - facts["places"] <= ahead


def test_folders_hold_what_draws_tokens(tmp_path):
    from safetensors.torch import load_file

    model = tiny.janus(torch.float32)
    folder = save_model_for_vllm(model, tmp_path / "janus")
    config = json.loads((folder / "config.json").read_text())
    # 48 ids of text, 24 codes above, and an id that ends a request.
    assert config["visual_spec"]["image_ids"] == [48, 72]
    assert (config["vocab_size"], config["eos_token_id"]) == (73, 72)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    codes = torch.arange(24)
    assert torch.equal(table[:48], model.get_input_embeddings().weight)
    assert torch.equal(table[48:72], model.prepare_embeddings_for_image_generation(codes))
    names = set(
        load_file(save_model_for_vllm(tiny.emu3(), tmp_path / "emu3", grids=[(5, 6)]) / "model.safetensors")
    )
    assert not [
        name
        for name in names
        if not name.startswith(("model.layers.", "model.embed", "model.norm", "lm_head"))
    ]
    config = json.loads((tmp_path / "emu3" / "config.json").read_text())
    assert config["visual_spec"]["image_ids"] == [20, 44] and config["visual_spec"]["row_end"] == 9


def test_what_cannot_be_served_is_named(tmp_path):
    gaps = tiny.emu3()
    gaps.config.vocabulary_map["<|visual token 000023|>"] = 60
    gaps = type(gaps)(gaps.config)
    cases: list[tuple[Any, Any, str]] = [
        (tiny.chameleon(), [(4, 4)], "ChameleonForConditionalGeneration"),
        (tiny.emu3(), None, "grids=None"),
        (tiny.janus(), [(4, 4)], r"grids=\[\(4, 4\)\]"),
        (gaps, [(5, 6)], "20 to 60"),
        (torch.nn.Linear(1, 1), None, "Linear"),
    ]
    for model, grids, named in cases:
        refuses((TypeError, ValueError), named, save_model_for_vllm, model, tmp_path, grids=grids)


def test_prompts_are_those_of_the_adapter():
    """Without padding; the prompt without a caption is the one of transformers' own guidance."""
    asked = tiny.prompts([6, 4], low=6, high=48, pad=0, last=3, first=1)
    row = {name: value[1:] for name, value in asked.items()}
    own = asked["input_ids"][1, 2:].tolist()
    assert ModelPrompts(tiny.janus(), guided=True).of(row) == (own, [1, 0, 0, 3])
    assert ModelPrompts(tiny.janus()).of(row) == (own,)
    refuses(ValueError, "2 prompts", ModelPrompts(tiny.janus()).of, asked)
