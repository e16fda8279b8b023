"""The folder of `shapes_masked` as its script assembles it, of a random model: loaded, drawn with, compared, judged."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.assemble import RECIPES, assemble
from scripts.train.causal_layer import new_layer
from scripts.train.masked_image import new_model
from scripts.train.shortcut import new_shortcut
from tests.helpers.command import last_line
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_masked_pipeline, tiny_pipeline, tiny_readers
from visual_spec import cli
from visual_spec.eval.defaults import settings_beside, settings_of_model
from visual_spec.eval.pair import MaskedPair
from visual_spec.eval.settings import parse_setting
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.pipelines.embedded import describe
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.speculative import SpeculativeMaskedSampler
from visual_spec.training.loop import round_matrices

RECIPE, SAVED = RECIPES["shapes_masked"], "masked:steps=3,choice_temperature=1.0"
PROMPT = "a large red circle on a plain sky background"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes of a random model, beside the folder whose parts it shares."""
    home: Path = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    encoder, vq_model = tiny_readers()
    encoder.save_pretrained(home / "shapes" / "text_encoder")
    vq_model.save_pretrained(home / "shapes" / "vq_model")
    model: MaskedImageTransformer = new_model(vq_model, encoder, dim=16, num_layers=2, num_heads=2)
    for block in model.blocks:  # a fresh network's layers are the identity
        torch.nn.init.normal_(block.mlp[1].weight, std=0.4)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(home / "trained")
    (home / "trained" / "training.json").write_text("{}\n")
    out = home / "shapes_masked"
    assemble(RECIPE, {"transformer": home / "trained"}, out, sampler=SAVED, default_guidance_scale=2.5)
    return home / "shapes_masked"


def load(folder: Path) -> Any:
    return quiet(load_pipeline(folder))


def test_what_it_shares_stays_where_it_is(folder):
    assert json.loads((folder / "shared.json").read_text()) == {
        "vq_model": "shapes",
        "text_encoder": "shapes",
    }
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert held == {
        "model_index.json",
        "shared.json",
        "sampler/sampler_config.json",
        *(f"transformer/{name}" for name in ("config.json", "training.json")),
        "transformer/diffusion_pytorch_model.safetensors",
    }
    facts = describe(folder)
    assert facts["image_size"] == 32 and set(facts["parameters"]) == {
        "transformer",
        "vq_model",
        "text_encoder",
    }
    pipe = load(folder)
    pixels = pipe(PROMPT, generator=seeded(0), output_type="np").images
    assert pixels.shape == (1, 32, 32, 3) and pipe.default_settings()["guidance_scale"] == 2.5
    assert pipe.calls == describe(folder)["calls"] == ("masked",)


def test_it_draws_as_it_was_saved_and_is_compared_with_one_token_a_call(folder, tmp_path, capsys):
    arguments = ["generate", PROMPT, "--model", str(folder), "--device", "cpu", "--json"]
    assert cli.main([*arguments, "--out", str(tmp_path / "one")]) == 0
    drawn = last_line(capsys)
    assert (drawn["sampler"]["name"], drawn["sampler"]["steps"]) == ("masked", 3)
    assert drawn["images"][0]["calls"] == 3 and not drawn["sampler"]["measure"]
    assert cli.main([*arguments, "--out", str(tmp_path / "two"), "--compare"]) == 0
    printed = capsys.readouterr().out
    (row,) = json.loads(printed.splitlines()[-1])["comparison"]
    assert (row["plain_calls"], row["calls"]) == (16, 3) and not row["identical"]
    pipe = load(folder)
    measured = MaskedSampler.from_config(pipe.sampler.config, measure=True)
    pipe.sampler = measured
    found = pipe(PROMPT, generator=seeded(0))
    assert row["output_law"] == found.trace.output_law and found.trace.divergence > 0
    assert f"{found.trace.divergence:.4f} a slot from one token a call" in printed
    assert (tmp_path / "two" / "comparison.html").exists()
    saved = np.asarray(found.images[0])
    import PIL.Image

    assert np.array_equal(np.asarray(PIL.Image.open(drawn["images"][0]["file"])), saved)
    # Speculation of the same law gives the tokens of plain decoding.
    same = [*arguments, "--out", str(tmp_path / "three"), "--compare", "--sampler", "speculative-masked"]
    assert cli.main(same) == 0
    (row,) = last_line(capsys)["comparison"]
    assert row["identical"] and row["calls"] < 16


def test_its_rows_are_calls_in_two_orders_and_by_entropy(folder):
    known = settings_of_model(str(folder))
    assert known.masked and known.plain == "speculative-masked:num_drafts=0"
    made = {text: parse_sampler(text)[1] for text in known.others}
    for text in made:
        name, settings = parse_sampler(text)
        assert isinstance(make_sampler(name, **settings), MaskedSampler) and settings["measure"]
    assert all(part.get("choice_temperature") == 1.0 or "score" in part for part in made.values())
    plain = [part for part in made.values() if "entropy_bound" not in part]
    assert sorted((part["steps"], part.get("score", "confidence")) for part in plain) == sorted(
        (steps, score) for steps in (4, 8, 16, 32) for score in ("confidence", "halton")
    )
    assert sum("entropy_bound" in part for part in made.values()) == 2


def test_what_is_trained_beside_the_model_is_kept_and_measured(folder, tmp_path):
    """A shortcut and a causal layer: the script puts them into the folder, from which pipelines take them."""
    shutil.copytree(folder.parent / "shapes", tmp_path / "shapes")
    model: Any = load(folder).transformer
    made = {"shortcut": new_shortcut(model, 8), "causal_layer": new_layer(model, 8)}
    for part, network in made.items():
        round_matrices(network, tmp_path / part)
        (tmp_path / part / "training.json").write_text("{}\n")
    parts = {"transformer": folder.parent / "trained"} | {part: tmp_path / part for part in made}
    assemble(RECIPE, parts, tmp_path / "both", sampler=SAVED, default_guidance_scale=2.5)
    pipe = load(tmp_path / "both")
    for part, network in made.items():
        assert (tmp_path / "both" / part / "training.json").exists()
        assert "_name_or_path" not in (tmp_path / "both" / part / "config.json").read_text()
        held = getattr(pipe, part).state_dict()
        assert all(torch.equal(held[name], value) for name, value in network.state_dict().items())
    others = settings_of_model(str(tmp_path / "both")).others
    more = set(others) - set(settings_of_model(str(folder)).others)
    assert not more  # what does not pay is measured where it is named
    for text in ("reusing-masked:steps=4,reuse=1,reuse_by=shortcut", "self-speculative-masked"):
        name, settings = parse_sampler(text)
        pipe.sampler = make_sampler(name, **settings)
        assert pipe(PROMPT, generator=torch.Generator().manual_seed(0)).trace.target_calls.item() > 1


@pytest.mark.parametrize("beside", [False, True])
def test_it_is_judged_alone_and_beside_a_model_of_the_same_tokens(folder, tmp_path, capsys, beside):
    arguments = ["eval", "--model", str(folder), "--device", "cpu", "--samples", "4", "--batch-size", "2"]
    arguments += ["--alone", "0", "--controls", "--json", "--out", str(tmp_path / "out")]
    rows = ["speculative-masked:num_drafts=0", "masked:steps=2,measure=true"]
    if beside:
        from visual_spec.models.next_token.llamagen import LlamaGenTransformer
        from visual_spec.pipelines.image import ImagePipeline
        from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler

        pipe = load(folder)
        torch.manual_seed(3)
        model = LlamaGenTransformer(
            vocab_size=16, dim=16, num_layers=1, num_heads=2, grid_size=4, prefix_length=20,
            num_classes=None, caption_dim=8,
        )  # fmt: skip
        other = ImagePipeline(model.eval(), pipe.vq_model, pipe.text_encoder, AutoregressiveSampler())
        other.save_pretrained(tmp_path / "first")
        arguments[2] = str(tmp_path / "first")
        arguments += ["--masked", str(folder)]
        rows = ["autoregressive", "masked:steps=2,measure=true", "speculative-masked:num_drafts=0"]
    arguments += ["--samplers", "masked:steps=2,measure=true"]
    assert cli.main(arguments) == 0
    document = last_line(capsys)
    found = {row["name"]: row for row in document["rows"]}
    assert list(found)[: len(rows)] == rows
    fast = found["masked:steps=2,measure=true"]
    assert fast["tokens_per_call"]["value"] == 8.0 and fast["divergence"]["value"] > 0
    assert fast["kind"] == "lossy" and fast["law"]["guidance_scale"] == 2.5
    if not beside:
        assert found[rows[0]]["kind"] == "plain" and found[rows[0]]["tokens_per_call"]["value"] == 1.0


def test_pairs_are_of_one_tokenizer_and_one_order_each():
    pipe, masked = tiny_pipeline(), tiny_masked_pipeline()
    pair = MaskedPair(pipe, masked)
    for sampler, player in (
        (pipe.sampler, pipe),
        (MaskedSampler(2), masked),
        (SpeculativeMaskedSampler(), masked),
    ):
        pair.sampler = sampler
        assert pair.player is player
        found = pair("a red circle", generator=seeded(1), guidance_scale=2.0)
        own = player.sampler
        player.sampler = sampler
        assert torch.equal(
            player("a red circle", generator=seeded(1), guidance_scale=2.0).tokens, found.tokens
        )
        player.sampler = own
    refuses(ValueError, "--model tunes --masked", MaskedPair, masked, pipe)
    other = tiny_masked_pipeline()
    with torch.no_grad():
        next(other.vq_model.parameters()).add_(1.0)
    refuses(ValueError, "different tokenizers", MaskedPair, pipe, other)


def test_what_stands_beside_a_model_is_masked(folder, tmp_path):
    tiny_pipeline().save_pretrained(tmp_path / "a")
    known = settings_of_model(str(tmp_path / "a"))
    found = settings_beside(str(folder), known)
    assert found is not None and found.masked
    for name in (tmp_path / "a", folder):
        refuses(ValueError, "--masked", settings_beside, str(name), settings_of_model(str(folder)))
    assert parse_setting(found.plain, found.law_with(), 0).sampler.config.num_drafts == 0
