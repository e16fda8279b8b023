"""Training of `shapes_shuffle`: its start from a raster model, a run that is killed, and the folder of changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.train import shuffle
from scripts.train.shuffle import ShuffleTraining, start_from_raster, train_shuffle
from tests.helpers.refusals import refuses
from tests.helpers.training import check_training, shrink_pictures, tiny_raster
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.orders.ordered import OrderedSampler

SHORT = ShuffleTraining(
    steps=40, batch_size=8, scenes=16, learning_rate=1e-2, rank=2, caption_dropout=0.2, compile=False
)


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    shrink_pictures(monkeypatch, shuffle, "held_out_loss")


@torch.no_grad()
def test_it_starts_near_the_raster_model():
    """Of blocks of one token four times, the transformer reads that token, and the head what it read before."""
    one, model = tiny_raster(), start_from_raster(tiny_raster(), rank=2)
    weights = model.state_dict()
    assert all(torch.equal(weights[key], one.state_dict()[key]) for key in shuffle_shared(weights))
    embedded = one.tok_embeddings.weight  # [V, 16]
    main = torch.linalg.svd(embedded, full_matrices=False).Vh[:4]
    read = model.embed(torch.arange(16).repeat_interleave(4)[None], torch.arange(16)[None])[0]
    assert torch.allclose(read, embedded @ main.T @ main, rtol=0.1, atol=0.01 * float(embedded.abs().max()))
    features = torch.randn(1, 3, 16)
    heads = torch.linalg.svd(one.output.weight, full_matrices=False).Vh[:4]
    logits = model.logits(features, features, None).view(3, 4, 16)
    want = features[0] @ heads.T @ heads @ one.output.weight.T
    assert float((logits - want[:, None]).abs().max()) < 0.25 * float(want.abs().max())


def shuffle_shared(weights: dict[str, Any]) -> list[str]:
    return [key for key in weights if key.startswith((*shuffle.SHARED, "norm"))]


def test_it_learns_and_an_interrupted_run_ends_where_an_uninterrupted_one_does(readers, tmp_path: Path):
    encoder, vq_model = readers
    tiny_raster().save_pretrained(tmp_path / "shapes" / "transformer")

    def train(out: Path, every: int) -> tuple[dict[str, Any], Any]:
        torch.manual_seed(4)
        model = start_from_raster(tiny_raster(), SHORT.rank)
        return train_shuffle(model, encoder, vq_model, SHORT, out, every=every), model

    runs = tmp_path / "runs"
    record = check_training(runs, train, 6, every=4, saved={"": LlamaGenTransformer})
    assert record["loss"][-1][1] < record["loss"][0][1] or len(record["loss"]) == 1
    trained: Any = LlamaGenTransformer.from_pretrained(runs / "whole", torch_dtype=torch.float32)
    held_out = shuffle.held_out_loss(trained, encoder, vq_model)
    assert record["held_out_loss"] == pytest.approx(held_out, abs=1e-3)
    start = shuffle.held_out_loss(start_from_raster(tiny_raster(), SHORT.rank), encoder, vq_model)
    assert held_out < start - 0.2
    drawn = OrderedSampler()(trained, encoder(["red circle"]), law=TokenLaw(), batch_size=1)
    assert drawn.tokens.shape == (1, 16) and (drawn.trace.target_calls == 4).all()
    again = start_from_raster(tiny_raster(), SHORT.rank)
    shuffle.load_changes(again, runs / "whole")
    shuffle.merge_changes(again)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in again.state_dict().items())
    check_folder_of_changes(runs / "whole", trained, tmp_path)


def check_folder_of_changes(folder: Path, trained: Any, tmp_path: Path) -> None:
    """It holds changes only, W + up @ down; what it becomes is saved whole; a folder that does not fit is refused."""
    (file,) = folder.glob("*.safetensors")
    held, base = load_file(file), tiny_raster().state_dict()
    name = "layers.1.attention.wo.weight"
    assert not held.keys() & base.keys() - {key for key in base if "norm" in key}
    want = base[name] + held[f"{name}.up"].float() @ held[f"{name}.down"].float()
    assert torch.equal(trained.state_dict()[name], want)
    trained.save_pretrained(tmp_path / "whole")
    again = LlamaGenTransformer.from_pretrained(tmp_path / "whole", torch_dtype=torch.float32)
    assert torch.equal(again.state_dict()[name], want) and not list((tmp_path / "whole").glob("adapter*"))
    adapter = folder / "adapter.json"
    for owner in ("nothing/transformer", "../shapes/transformer"):
        adapter.write_text(json.dumps({"adapts": owner}))
        refuses(ValueError, f"'{owner}'.*place it", LlamaGenTransformer.from_pretrained, folder)
    adapter.write_text(json.dumps({"adapts": "shapes/transformer"}))
    save_file(held | {"layers.7.wo.weight.up": torch.ones(16, 2)}, file)
    refuses(ValueError, r"layers\.7", LlamaGenTransformer.from_pretrained, folder)
    save_file({key: value for key, value in held.items() if "compress" not in key}, file)
    refuses(ValueError, "1 missing: compress.weight", LlamaGenTransformer.from_pretrained, folder)
