"""Training of `motion_planned`: its start, the places it hides, a run that is killed, and the folder of changes."""

from dataclasses import replace

import torch
from safetensors.torch import load_file

from scripts.train import frames, planned
from scripts.train.planned import PlannedTraining, drawn_masks, start_from_frames, train_planned
from tests.helpers.training import check_training
from visual_spec.models.masked.frames import FrameMaskedTransformer

SHORT = PlannedTraining(steps=4, batch_size=1, rank=2, compile=False)
KEYS = [1, 8, 15]


def test_all_frames_of_a_group_hide_the_same_share():
    groups = [[0], KEYS, [frame for frame in range(1, 16) if frame not in KEYS]]
    hidden = drawn_masks(replace(SHORT, tubes=0.3), groups, 200, step=2)
    counts = hidden.sum(2)
    assert hidden.shape == (200, 16, 64)
    for group in groups:
        assert (counts[:, group] == counts[:, group[:1]]).all()
    assert counts.min() == round(0.1 * 64) and (counts[:, 0] != counts[:, 1]).double().mean() > 0.7
    tube = ((hidden[:, 2] == hidden[:, 3]).all(1)).double().mean().item()
    assert 0.2 < tube < 0.5  # clips that hide all of a group count as well
    assert torch.equal(hidden, drawn_masks(replace(SHORT, tubes=0.3), groups, 200, step=2))


def test_only_changes_are_trained_and_stored(tmp_path, monkeypatch, parts, vq_model):
    monkeypatch.setattr(planned, "encode_parts", lambda model: parts)
    torch.manual_seed(3)
    known, encoder = frames.new_model(vq_model, 16, 2, 2, 24)
    known.save_pretrained(tmp_path / "motion_masked" / "transformer")

    def train(out, every):
        torch.manual_seed(4)
        model = start_from_frames(tmp_path / "motion_masked", KEYS, SHORT.rank)
        assert model.frame_groups[1] == KEYS
        start, known_weights = dict(model.transformer.named_parameters()), known.transformer.state_dict()
        assert torch.equal(start["output.weight"], known_weights["output.weight"])
        return train_planned(model, encoder, vq_model, SHORT, out, every=every), model

    record = check_training(tmp_path / "runs", train, 2, every=2, saved={"": FrameMaskedTransformer})
    assert record["held_out_loss_between"] > 0
    held = load_file(tmp_path / "runs" / "whole" / "diffusion_pytorch_model.safetensors")
    assert all(name.endswith((".up", ".down")) or "norm" in name or "place" in name for name in held)
    name = "transformer.layers.1.attention.wo.weight"
    want = known.state_dict()[name] + held[f"{name}.up"].float() @ held[f"{name}.down"].float()
    loaded = FrameMaskedTransformer.from_pretrained(tmp_path / "runs" / "whole", torch_dtype=torch.float32)
    assert torch.equal(loaded.state_dict()[name], want)
    assert torch.equal(loaded.transformer.tok_embeddings.weight, known.transformer.tok_embeddings.weight)
