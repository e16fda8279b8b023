"""Saved folders: what diffusers and transformers would load in silence is refused, and names the folder and the key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EncodecConfig, EncodecModel

from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_vq_model
from visual_spec.models.core.saved import check_folder, check_loaded
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter

KEY = "decoder.conv_in.weight"
SIZES: dict[str, Any] = dict(vocab_size=12, dim=16, num_layers=2, num_heads=2, grid_size=4, num_classes=3)


def changed(folder: Path, change) -> Path:
    """The folder with other weights."""
    path = next(folder.glob("*.safetensors"))
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_vq_model().save_pretrained(tmp_path / "vq")
    return tmp_path / "vq"


WRONG = {
    "nan": (
        lambda w: w[KEY].view(-1)[:3].fill_(torch.nan),
        f"vq is damaged: 3 of .* values of {KEY} are nan",
    ),
    "infinite": (lambda w: w[KEY].view(-1)[:1].fill_(torch.inf), f"1 of .* values of {KEY}"),
    "missing": (lambda w: w.pop(KEY), f"vq does not hold the VQModel of its config.json: 1 missing: {KEY}"),
    "renamed": (lambda w: w.update({"other": w.pop(KEY)}), f"1 missing: {KEY}; 1 unexpected: other"),
    "foreign": (lambda w: w.update({"other": torch.ones(2)}), "1 unexpected: other"),
    "another shape": (lambda w: w.update({KEY: w[KEY][:1].clone()}), f"1 of another shape: {KEY}"),
    **{
        str(dtype): (lambda w, dtype=dtype: w.update({KEY: w[KEY].to(dtype)}), f"vq: {KEY} is of {dtype}")
        for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights_are_named(folder, name):
    change, message = WRONG[name]
    VQModel.from_pretrained(folder)
    with pytest.raises(ValueError, match=message) as error:
        VQModel.from_pretrained(changed(folder, change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_weights_are_cast_as_asked(folder, dtype):
    def cast(weights):
        weights.update({key: value.to(dtype) for key, value in weights.items()})

    loaded = VQModel.from_pretrained(changed(folder, cast), torch_dtype=torch.float32)
    assert loaded.dtype == torch.float32
    assert VQModel.from_pretrained(folder, torch_dtype=dtype).dtype == dtype


@pytest.mark.parametrize("layers", [1, 3, 10**9])
def test_a_number_of_layers_that_is_not_that_of_the_weights_is_refused(tmp_path, layers):
    """One layer fewer used to draw, without a word, what another model would."""
    LlamaGenTransformer(**SIZES).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": layers}))
    with pytest.raises(
        ValueError, match=r"unexpected: layers.1|missing: layers.2|says num_layers=1000000000"
    ):
        LlamaGenTransformer.from_pretrained(tmp_path)


CONFIGURATIONS = {
    "broken": ("{", r"config\.json.*JSON"),
    "deep": ("[" * 100_000, r"config\.json.*JSON"),
    "a list": ("[]", r"config\.json.*list"),
    "null": ("null", r"config\.json.*NoneType"),
    "absurd": ('{"base_channels": 1000000000000}', "makes no VQModel|does not hold"),
    "a word": ('{"base_channels": "wide"}', "base_channels='wide'"),
    "nothing": ('{"channel_multipliers": []}', r"config\.json.*VQModel"),
    "negative": ('{"base_channels": -8}', r"config\.json.*VQModel"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_that_make_no_such_model_are_refused(folder, name):
    text, message = CONFIGURATIONS[name]
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **json.loads(text)}) if ": " in text else text
    )
    refuses(ValueError, message, VQModel.from_pretrained, folder)


def test_damaged_files_are_named(folder):
    path = next(folder.glob("*.safetensors"))
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 50, whole[:8] + b"[" + whole[9:]):
        path.write_bytes(content)
        refuses(ValueError, f"{path.name}.*truncated", VQModel.from_pretrained, folder)


def test_eight_bits_are_read_where_a_model_says_that_it_is_stored_so(tmp_path):
    sizes: dict[str, Any] = dict(
        dim=8, ffn_dim=16, num_blocks=1, num_codebooks=2, num_heads=2, num_layers=3, taps=(1, 2), vocab_size=5
    )
    drafter = ColumnEagleDrafter(**sizes)
    drafter.save_pretrained(tmp_path)

    def narrow(weights):
        weights.update({k: v.to(torch.float8_e4m3fn) for k, v in weights.items() if v.ndim == 2})

    loaded = ColumnEagleDrafter.from_pretrained(changed(tmp_path, narrow))
    for key, value in drafter.state_dict().items():
        wanted = value.to(torch.float8_e4m3fn).float() if value.ndim == 2 else value
        assert torch.equal(loaded.state_dict()[key], wanted)


@pytest.fixture(scope="module")
def codec_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("codec")
    config = EncodecConfig(hidden_size=8, num_filters=2, codebook_size=8, codebook_dim=8, num_lstm_layers=1)
    EncodecModel(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers_are_compared_with_their_files(codec_folder, tmp_path):
    check_folder(codec_folder, EncodecModel)
    check_loaded(EncodecModel.from_pretrained(codec_folder), str(codec_folder))
    key = "decoder.layers.0.conv.bias"
    for number, (change, message) in enumerate(
        [
            (lambda w: w.pop(key), f"does not hold the EncodecModel of its config.json: 1 missing: {key}"),
            (lambda w: w.update({"other": torch.ones(1)}), "1 unexpected: other"),
            (lambda w: w[key].fill_(torch.nan), f"values of {key} are nan"),
            (lambda w: w.update({key: w[key].long()}), f"{key} is of torch.int64"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(codec_folder, folder)
        model = EncodecModel.from_pretrained(changed(folder, change))
        with pytest.raises(ValueError, match=f"{folder}.*{message}"):
            check_folder(folder, EncodecModel)
            check_loaded(model, str(folder))


def test_models_of_transformers_are_read_in_eight_bits_where_their_configuration_says_so(
    codec_folder, tmp_path
):
    folder, key = tmp_path / "codec", "quantizer.layers.0.codebook.embed"
    shutil.copytree(codec_folder, folder)
    changed(folder, lambda w: w.update({key: w[key].to(torch.float8_e4m3fn)}))
    model = EncodecModel.from_pretrained(folder, dtype=torch.float32)
    refuses(ValueError, f"{key} is of torch.float8_e4m3fn", check_folder, folder, EncodecModel)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stored_as": "float8_e4m3fn"}))
    model = EncodecModel.from_pretrained(folder, dtype=torch.float32)
    check_folder(folder, EncodecModel)
    whole = EncodecModel.from_pretrained(codec_folder).state_dict()[key]
    assert torch.equal(model.state_dict()[key], whole.to(torch.float8_e4m3fn).float())


def test_whole_numbers_are_read_as_directions_and_as_nothing_else(codec_folder, tmp_path):
    prefix = "decoder.layers.0.conv.parametrizations.weight.original"
    for stored_as in ("int8", ["float8_e4m3fn", "int8"], "float8_e4m3fn", 8, {}):
        folder = tmp_path / str(stored_as)[:9]
        shutil.copytree(codec_folder, folder)
        changed(folder, lambda w: w.update({f"{prefix}1": w[f"{prefix}1"].mul(300).to(torch.int8)}))
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "stored_as": stored_as}))
        model = EncodecModel.from_pretrained(folder, dtype=torch.float32)
        if "int8" not in str(stored_as):
            refuses(ValueError, f"{prefix}1 is of torch.int8", check_folder, folder, EncodecModel)
            continue
        check_folder(folder, EncodecModel)
        assert model.state_dict()[f"{prefix}1"].dtype == torch.float32
        changed(folder, lambda w: w.update({f"{prefix}0": w[f"{prefix}0"].to(torch.int8)}))
        refuses(ValueError, f"{prefix}0 is of torch.int8", check_folder, folder, EncodecModel)
