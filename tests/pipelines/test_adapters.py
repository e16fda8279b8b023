"""LoRA adapters: what a pipeline draws with one is what it draws with the product of its matrices in the weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.helpers.pipelines import KINDS, Kind
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, tiny_pipeline
from tests.helpers.tiny_audio import tiny_audio_pipeline
from tests.helpers.tiny_continuous import tiny_latent_pipeline
from visual_spec.models.core.adapters import adapter_state, weight_of
from visual_spec.models.core.saved import SavedModel

peft = pytest.importorskip("peft")

KINDS = {name: kind for name, kind in KINDS.items() if isinstance(kind.make().transformer, SavedModel)}
KINDS |= {name: Kind(lambda name=name: tiny_latent_pipeline(name), 1) for name in ("mar", "causal")}


def random_lora(model: nn.Module, rank: int = 2, seed: int = 7, size: float = 0.3) -> dict[str, Tensor]:
    """Matrices of an adapter of all linear layers and convolutions of 1 x 1, as diffusers writes them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            shapes = (rank, layer.in_features), (layer.out_features, rank)
        elif isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
            shapes = (rank, layer.in_channels, 1, 1), (layer.out_channels, rank, 1, 1)
        else:
            continue
        for part, shape in zip("AB", shapes, strict=True):
            found[f"transformer.{name}.lora_{part}.weight"] = size * torch.randn(shape, generator=generator)
    return found


def add_by_hand(model: nn.Module, lora: dict[str, Tensor], scale: float = 1.0) -> None:
    """Add the products to the weights."""
    layer: Any
    for name, layer in model.named_modules():
        if (a := lora.get(f"transformer.{name}.lora_A.weight")) is not None:
            b = lora[f"transformer.{name}.lora_B.weight"]
            product = b.flatten(1).double() @ a.flatten(1).double()
            layer.weight.data += scale * product.reshape(layer.weight.shape).to(layer.weight)


def drawn(kind: Kind, pipe: Any) -> np.ndarray:
    made = kind.ask(pipe, output_type="pt")
    return np.asarray(made[0] if isinstance(made, tuple) else made.to_tuple()[0], dtype=np.float64)


def wide(pipe: Any) -> Any:
    """The pipeline in float64, so that sums in another order draw the same."""
    pipe.to(torch.float64)
    return pipe


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_draws_as_its_product_in_the_weights(name: str) -> None:
    kind = KINDS[name]
    plain, pipe, half, whole = (wide(kind.make()) for _ in range(4))
    before = drawn(kind, plain)
    lora = random_lora(pipe.transformer, size=1.0 if name in ("scales", "bits") else 0.3)
    pipe.load_lora_weights(lora, adapter_name="mine")
    wide(pipe)
    add_by_hand(whole.transformer, lora)
    add_by_hand(half.transformer, lora, 0.5)
    wanted = drawn(kind, whole)
    assert not np.allclose(before, wanted)
    assert np.allclose(drawn(kind, pipe), wanted, atol=1e-6)
    pipe.set_adapters("mine", 0.5)
    assert np.allclose(drawn(kind, pipe), drawn(kind, half), atol=1e-6)
    pipe.disable_lora()
    assert np.allclose(drawn(kind, pipe), before, atol=1e-6)
    pipe.enable_lora()
    pipe.set_adapters("mine", 1.0)
    pipe.fuse_lora()
    assert pipe.num_fused_loras == 1 and np.allclose(drawn(kind, pipe), wanted, atol=1e-6)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    assert pipe.get_list_adapters() == {} and np.allclose(drawn(kind, pipe), before, atol=1e-6)


def test_weight_of_a_convolution_of_two_adapters() -> None:
    pipe = tiny_pipeline()
    layer = nn.Conv2d(3, 4, 1)
    pipe.transformer.register_module("more", layer)
    parts = [random_lora(pipe.transformer, seed=seed) for seed in (1, 2)]
    wanted = layer.weight.detach().clone()
    for scale, lora in zip((0.25, 2.0), parts, strict=True):
        product = torch.einsum(
            "orhw,rihw->oihw",
            lora["transformer.more.lora_B.weight"].double(),
            lora["transformer.more.lora_A.weight"].double(),
        )
        wanted += scale * product
    states = [adapter_state([pipe.transformer])]
    for name, lora in zip("ab", parts, strict=True):
        pipe.load_lora_weights(lora, adapter_name=name)
        states.append(adapter_state([pipe.transformer]))
    pipe.set_adapters(["a", "b"], [0.25, 2.0])
    states.append(adapter_state([pipe.transformer]))
    assert torch.allclose(weight_of(pipe.transformer.more), wanted.float(), atol=1e-5)
    # A recorded graph of one of them is not taken for another.
    assert len(set(states)) == 4 and states[0] == ()


def test_files_of_diffusers_and_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    pipe, again, third = tiny_pipeline(), tiny_pipeline(), tiny_pipeline()
    adapted: Any = get_peft_model(
        tiny_pipeline().transformer, LoraConfig(r=2, lora_alpha=6, target_modules=["wqkv", "w1"])
    )
    for key, value in adapted.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(value, generator=torch.Generator().manual_seed(len(key)))
    adapted.save_pretrained(tmp_path / "peft")
    pipe.load_lora_weights(tmp_path / "peft", adapter_name="mine")
    pipe.save_lora_weights(tmp_path / "ours", "mine")
    again.load_lora_weights(tmp_path / "ours")
    third.load_lora_weights(str(tmp_path / "ours" / "pytorch_lora_weights.safetensors"))
    merged = dict(adapted.merge_and_unload().named_parameters())
    for one in (pipe, again, third):
        one.fuse_lora()
        one.unload_lora_weights()  # what was fused stays
        for key, value in one.transformer.named_parameters():
            assert torch.allclose(value, merged[key], atol=1e-6)


def state_of(model: nn.Module) -> Any:
    """Which modules there are, and what each holds of its own."""
    modules = {name: id(module) for name, module in model.named_modules()}
    parameters = {name: (id(value), value.requires_grad) for name, value in model.named_parameters()}
    return modules, parameters, adapter_state([model]), repr(getattr(model, "peft_config", {}))


@pytest.mark.parametrize("earlier", ["", "stylish"])
@pytest.mark.parametrize(
    "case", ["rank of the settings", "name with a dot", "interrupted", "settings of a kind"]
)
def test_an_adapter_is_added_whole_or_not_at_all(
    tmp_path: Path, monkeypatch, case: str, earlier: str
) -> None:
    pipe = quiet(tiny_pipeline())
    lora = random_lora(pipe.transformer)
    if earlier:
        pipe.load_lora_weights(random_lora(pipe.transformer, seed=8), adapter_name=earlier)
    before, drawn = state_of(pipe.transformer), pipe("a circle", generator=torch.Generator().manual_seed(0))
    settings = dict(r=2, lora_alpha=2, target_modules=["wqkv", "w1"])
    if case == "rank of the settings":
        settings |= dict(r=3)
    elif case == "settings of a kind":
        settings |= dict(lora_alpha="two")
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(lora, folder / "adapter_model.safetensors")
    if case in ("rank of the settings", "settings of a kind"):
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    elif case == "interrupted":
        monkeypatch.setattr(peft, "set_peft_model_state_dict", interrupted)
    name = "st.y" if case == "name with a dot" else "styl"  # a part of the earlier one's
    with pytest.raises(KeyboardInterrupt if case == "interrupted" else ValueError) as told:
        pipe.load_lora_weights(folder, adapter_name=name)
    assert case == "interrupted" or f"{folder / 'adapter_model.safetensors'} cannot be added" in str(
        told.value
    )
    assert state_of(pipe.transformer) == before
    monkeypatch.undo()
    again = pipe("a circle", generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.asarray(again.images[0]), np.asarray(drawn.images[0]))
    pipe.load_lora_weights(lora, adapter_name="styl")  # nothing is in the way of another one
    assert pipe.get_active_adapters() == ["styl"]


def interrupted(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def test_damaged_adapters_are_named(tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    lora, path = random_lora(pipe.transformer), tmp_path / "adapter_model.safetensors"
    key = next(iter(lora))
    for wrong, match in (
        ({name: value for name, value in lora.items() if "lora_B" not in name}, "lora_B.weight is missing"),
        (lora | {key: lora[key] * torch.nan}, "not all finite"),
        (lora | {key: lora[key][:1].contiguous()}, "of another rank"),
        (lora | {key: lora[key].to(torch.int8)}, "torch.int8"),
    ):
        save_file(wrong, path)
        refuses(ValueError, rf"{path}.*{match}", pipe.load_lora_weights, tmp_path)
    save_file(lora, path)
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:40], b"", b"x" * 100):
        path.write_bytes(content)
        refuses(ValueError, f"{path} is truncated or damaged", pipe.load_lora_weights, path)
    path.write_bytes(whole)
    for text in ("{", "[]"):
        (tmp_path / "adapter_config.json").write_text(text)
        refuses(ValueError, r"adapter_config\.json", pipe.load_lora_weights, path)
    assert not any("lora" in name for name, _ in pipe.transformer.named_modules())
    (tmp_path / "adapter_config.json").unlink()
    compiled = {
        name.replace("blocks.0.", "_orig_mod.blocks.0._orig_mod."): value for name, value in lora.items()
    }
    pipe.load_lora_weights(compiled)
    assert (
        sum("lora_A.default_0" in name for name, _ in pipe.transformer.named_parameters()) == len(lora) // 2
    )


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    lora = random_lora(pipe.transformer)
    key = next(key for key in lora if "lora_B" in key)
    for wrong, match in (
        ({"transformer.nowhere.lora_A.weight": torch.zeros(2, 3)}, "nowhere"),
        (lora | {key: torch.zeros(3, 2)}, r"\[3, 2\]"),
        (lora | {key.replace("lora_B.weight", "alpha"): torch.ones(())}, "alpha"),
        ({}, "holds nothing"),
    ):
        refuses(ValueError, match, pipe.load_lora_weights, wrong)
    refuses(FileNotFoundError, "missing", pipe.load_lora_weights, tmp_path / "missing.safetensors")
    refuses(ValueError, r"\.safetensors.*weight_name", pipe.load_lora_weights, tmp_path)
    refuses(ValueError, "MusicgenForCausalLM", tiny_audio_pipeline().load_lora_weights, lora)
    assert pipe.get_list_adapters() == {}
    pipe.load_lora_weights(lora)
    refuses(ValueError, "adapters", pipe.save_pretrained, tmp_path / "saved")
    pipe.unload_lora_weights()
    pipe.save_pretrained(tmp_path / "saved")
