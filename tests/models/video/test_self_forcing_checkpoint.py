"""Self-Forcing's layout, read into diffusers' Wan: every key, compared with diffusers' own table of names."""

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from tests.helpers.refusals import refuses
from tests.helpers.tiny_wan import HEAD_DIM, clips, official, prompts, saved, tiny_wan
from visual_spec.models.video.self_forcing_checkpoint import load_self_forcing
from visual_spec.pipelines.convert import convert


def flow(model):
    with torch.no_grad():
        inputs = clips(1, 3).float(), torch.tensor([500.0]), prompts(1).float()
        return model(*inputs, return_dict=False)[0]


def expected():
    model = tiny_wan().float()
    model.load_state_dict(convert_wan_transformer_to_diffusers(official()))
    return model


def test_every_key_goes_where_diffusers_puts_it(tmp_path):
    old = {f"model.{key}": value + 1 for key, value in official().items()}
    model = load_self_forcing(saved(tmp_path, official(), generator=old, step=3), head_dim=HEAD_DIM)
    wanted = expected().state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    assert torch.equal(flow(model), flow(expected()))


def test_the_dtype_is_cast_and_the_rotary_table_is_not_left_empty(tmp_path):
    model = load_self_forcing(saved(tmp_path, official()), head_dim=HEAD_DIM, dtype=torch.float64)
    assert model.dtype == torch.float64
    assert not any(buffer.is_meta for buffer in model.buffers())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("head.head.weight"), "lacks proj_out.weight"),
        (lambda w: w.pop("time_projection.1.weight"), "lacks condition_embedder.time_proj.weight"),
        (lambda w: w.update({"img_emb.proj.0.weight": torch.zeros(2)}), "Wan.*pictures"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    weights = official()
    change(weights)
    refuses(ValueError, message, load_self_forcing, saved(tmp_path, weights), head_dim=HEAD_DIM)


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path):
    refuses(ValueError, "24.*head_dim=128", load_self_forcing, saved(tmp_path, official()))


def test_convert_writes_a_folder_of_diffusers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        load_self_forcing,
        "__kwdefaults__",
        {"lora": None, "lora_scale": 1.0, "head_dim": HEAD_DIM, "dtype": None},
    )
    file = saved(tmp_path, official())
    facts = convert([file], tmp_path / "out")
    assert facts["class"] == "WanTransformer3DModel"
    assert facts["files"] == {str(file): "Wan"}
    loaded, wanted = WanTransformer3DModel.from_pretrained(tmp_path / "out"), expected()
    assert all(torch.equal(value, wanted.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert (flow(loaded) - flow(wanted)).abs().max() < 1e-4
    refuses(ValueError, "Wan.*LoRA", convert, [file, file], tmp_path / "other")
    refuses(ValueError, "image_size=256", convert, [file], tmp_path / "other", image_size=256)
    assert not (tmp_path / "other").exists()


def low_rank(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """As LongLive's: two matrices for each linear layer of a block, by PEFT's names."""
    generator, parts = torch.Generator().manual_seed(1), {}
    for key, value in official().items():
        if key.startswith("blocks.") and key.endswith(".weight") and value.ndim == 2:
            name = f"base_model.model.{key.removesuffix('.weight')}"
            parts[f"{name}.lora_A.weight"] = torch.randn(4, value.shape[1], generator=generator)
            parts[f"{name}.lora_B.weight"] = torch.randn(value.shape[0], 4, generator=generator)
    return parts | changes


@pytest.mark.parametrize("release", ["Causal-Forcing", "LongLive", "LongLive 2.0", "Krea realtime"])
def test_files_of_other_causal_students_are_read(tmp_path, release):
    """Where each release keeps its weights, as its own inference reads them."""
    from safetensors.torch import save_file

    named = {f"model.{key}": value for key, value in official().items()}
    file = tmp_path / "weights.pt"
    if release == "Causal-Forcing":
        torch.save({"generator": {key.replace("model.", "model._fsdp_wrapped_module."): value
                                  for key, value in named.items()}}, file)  # fmt: skip
    elif release == "LongLive":
        torch.save({"generator": named}, file)
    elif release == "LongLive 2.0":  # as its `merge_lora_generator.py` writes it
        facts = dict(checkpoint_format="longlive_generator_merged_lora", dtype="bfloat16", merged_lora=True)
        torch.save({"generator": named, **facts}, file)
    else:
        file = tmp_path / "krea-realtime-video-14b.safetensors"
        save_file(named, file)
    assert torch.equal(flow(load_self_forcing(file, head_dim=HEAD_DIM)), flow(expected()))


def test_a_lora_is_added_to_the_weights_it_names(tmp_path):
    weights, parts = official(), low_rank()
    for key, up in parts.items():
        if key.endswith(".lora_B.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            weights[f"{name}.weight"] += 0.5 * up @ parts[key.replace("lora_B", "lora_A")]
    wanted = tiny_wan().float()
    wanted.load_state_dict(convert_wan_transformer_to_diffusers(weights))
    torch.save({"generator_lora": parts}, tmp_path / "lora.pt")
    base = saved(tmp_path, official())
    model = load_self_forcing(base, lora=tmp_path / "lora.pt", lora_scale=0.5, head_dim=HEAD_DIM)
    torch.testing.assert_close(model.state_dict(), wanted.state_dict())
    assert (flow(model) - flow(expected())).abs().max() > 0.1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"base_model.model.blocks.7.ffn.0.lora_A.weight": torch.zeros(4, 24)},
            r"blocks\.7\.ffn\.net\.0.*lora_A",
        ),
        ({"base_model.model.blocks.0.ffn.0.lora_A.weight": torch.zeros(4, 25)}, r"\[4, 25\]"),
        ({"base_model.model.blocks.0.ffn.0.diff": torch.zeros(4)}, r"ffn\.net\.0\.proj\.diff"),
    ],
)
def test_a_lora_of_another_model_is_refused(tmp_path, changes, named):
    torch.save({"generator_lora": low_rank(**changes)}, tmp_path / "lora.pt")
    with pytest.raises(ValueError, match=named):
        load_self_forcing(saved(tmp_path, official()), lora=tmp_path / "lora.pt", head_dim=HEAD_DIM)


def test_convert_adds_a_lora(tmp_path, monkeypatch):
    own = {"lora": None, "lora_scale": 1.0, "head_dim": HEAD_DIM, "dtype": None}
    monkeypatch.setattr(load_self_forcing, "__kwdefaults__", own)
    base = saved(tmp_path, official())
    torch.save({"generator_lora": low_rank()}, tmp_path / "lora.pt")
    facts = convert([base, tmp_path / "lora.pt"], tmp_path / "out")
    assert sorted(facts["files"].values()) == ["LoRA of Wan", "Wan"]
    wanted = load_self_forcing(base, lora=tmp_path / "lora.pt").state_dict()
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in loaded.items())
    refuses(ValueError, "lora.pt given", convert, [tmp_path / "lora.pt"], tmp_path / "other")
