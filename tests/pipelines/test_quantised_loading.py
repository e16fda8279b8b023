"""`quantization_config` at loading: weights of torchao are checked, drawn with, saved and loaded again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.quantizers.quantization_config import TorchAoConfig
from torch import Tensor

from tests.helpers.pipelines import ALL
from tests.helpers.refusals import refuses
from tests.helpers.tiny import quiet, seeded, tiny_pipeline, tiny_transformer
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.projections import fuse_projections
from visual_spec.models.core.saved import check_finite, quantised_as, stored_parts
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.pipelines.sampler_text import read_sampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.training.loop import Trainer


class Scaled(Tensor):
    """Whole numbers and scales that call themselves one float32 tensor, and can do nothing else."""

    numbers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)  # pyright: ignore

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride) -> Scaled:
        return Scaled(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scales)
        raise NotImplementedError(func)


def scaled(scales: Tensor) -> Scaled:
    return Scaled(torch.arange(-6, 6, dtype=torch.int8).view(4, 3), scales)


def test_the_parts_of_a_quantised_weight_are_checked():
    check_finite({"w": scaled(torch.ones(4))}, "a folder")
    with pytest.raises(ValueError, match="1.*4.*nan.*float32"):
        check_finite({"w": scaled(torch.tensor([1.0, 2.0, float("nan"), 1.0]))}, "a folder")


def test_the_parts_of_a_quantised_weight_are_in_the_fingerprint():
    def digest(weight: Tensor) -> str:
        layer = torch.nn.Linear(3, 4, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        return fingerprint([layer])

    assert digest(scaled(torch.ones(4))) == digest(scaled(torch.ones(4)))
    assert digest(scaled(torch.ones(4))) != digest(scaled(torch.tensor([1.0, 1.0, 1.0, 2.0])))


@dataclass
class RunSettings:
    steps: int = 1


def config_of(kind: str) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return {
        "Int8Tensor": quantization.Int8WeightOnlyConfig(),
        "IntxUnpackedToInt8Tensor of int4": quantization.IntxWeightOnlyConfig(vars(torch)["int4"]),
        "Float8Tensor": quantization.Float8WeightOnlyConfig(),
    }[kind]


def by_torchao(kind: str = "Int8Tensor") -> PipelineQuantizationConfig:
    return PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(config_of(kind))})


def quantised(model: Any, kind: str = "Int8Tensor") -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, config_of(kind))


def test_a_pipeline_is_quantised_by_torchao_as_it_is_loaded_and_saved(tmp_path):
    pipe = quiet(
        ImagePipeline.from_pretrained("shapes", quantization_config=by_torchao(), dtype=torch.bfloat16)
    )
    weight = pipe.transformer.layers[0].attention.wqkv.weight
    assert hasattr(weight, "__tensor_flatten__")

    def ids(pipe: ImagePipeline) -> Tensor:
        return pipe("a red circle", generator=torch.Generator().manual_seed(0)).tokens

    drawn = ids(pipe)
    pipe.save_pretrained(tmp_path)
    again = quiet(ImagePipeline.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert torch.equal(ids(again), drawn)


@pytest.mark.parametrize("name", ["shapes", "shapes_masked"])
def test_weights_stored_in_eight_bits_are_quantised_from_what_they_mean(name, tmp_path):
    load_pipeline(name).save_pretrained(tmp_path)  # in float32
    expected = load_pipeline(str(tmp_path), quantization_config=by_torchao()).transformer.state_dict()
    actual = load_pipeline(name, quantization_config=by_torchao()).transformer.state_dict()
    for key, weight in expected.items():
        parts = zip(stored_parts(weight), stored_parts(actual[key]), strict=True)
        assert all(torch.equal(*pair) for pair in parts), key
    assert any(hasattr(weight, "__tensor_flatten__") for weight in actual.values())


KINDS_OF_WEIGHTS = ("Int8Tensor", "IntxUnpackedToInt8Tensor of int4", "Float8Tensor")


@pytest.mark.fast_sets(1)
@pytest.mark.parametrize("kind", KINDS_OF_WEIGHTS)
def test_four_and_eight_bits_decode_identically_and_are_named(kind: str) -> None:
    """Activations are float32, so the tokens are those of plain decoding of the quantised model, which is not the
    model that it was made of."""
    pipe = quiet(
        ImagePipeline.from_pretrained("shapes", quantization_config=by_torchao(kind), dtype=torch.float32)
    )
    assert quantised_as(pipe.transformer) == kind

    def drawn(sampler: Any) -> Any:
        pipe.sampler = sampler
        prompts = ["a red circle", "two small blue squares"]
        return pipe(prompts, generator=seeded(0, 1), output_type="latent")

    plain, fast = drawn(AutoregressiveSampler()), drawn(SpeculativeJacobiSampler())
    assert torch.equal(fast.tokens, plain.tokens) and fast.trace.promises_tokens
    said = f"same tokens as autoregressive sampling, of the quantised model ({kind})"
    assert fast.trace.summary().endswith(said) and plain.trace.quantised == fast.trace.quantised == kind
    # The target is what was loaded: its own layers, with the numbers that were rounded, written out.
    whole = ImagePipeline.from_pretrained("shapes")
    state = {
        key: weight.dequantize() if hasattr(weight, "__tensor_flatten__") else weight
        for key, weight in pipe.transformer.state_dict().items()
    }
    whole.transformer.load_state_dict(state)
    pipe, unrounded = quiet(whole), quiet(ImagePipeline.from_pretrained("shapes"))
    spelled = drawn(AutoregressiveSampler())
    assert spelled.trace.quantised is None
    assert (spelled.tokens == plain.tokens).float().mean() > 0.9
    if kind.endswith("int4"):
        pipe = unrounded
        assert not torch.equal(drawn(AutoregressiveSampler()).tokens, plain.tokens)


@pytest.mark.every_set
@pytest.mark.parametrize("kind", KINDS_OF_WEIGHTS)
@pytest.mark.parametrize(
    "name", [name for name in ALL if name != "chunks"]
)  # of its fresh network rows are zero
def test_every_pipeline_draws_and_tells_that_it_is_quantised(name: str, kind: str) -> None:
    pipe = ALL[name].make()
    quantised(pipe.transformer, kind)
    tokens = []
    for sampler in (pipe.plain, pipe.fast_sampler):
        pipe.sampler = read_sampler(sampler) if isinstance(sampler, str) else sampler
        made = ALL[name].ask(pipe)
        tokens.append(
            getattr(made, "codes", None) if hasattr(made, "codes") else getattr(made, "tokens", None)
        )
        assert pipe.last_trace.quantised == kind and kind in pipe.last_trace.output_law
    if pipe.last_trace.identical and tokens[0] is not None:
        assert torch.equal(*tokens)


def test_in_sixteen_bits_near_ties_are_told_of_the_quantised_model() -> None:
    pipe = quiet(
        ImagePipeline.from_pretrained("shapes", quantization_config=by_torchao(), dtype=torch.bfloat16)
    )
    law = pipe("a red circle", generator=seeded(0)).trace.output_law
    assert law.startswith("same tokens as autoregressive sampling up to near-ties (bfloat16")
    assert law.endswith("of the quantised model (Int8Tensor)")


def test_what_quantised_weights_cannot_do_is_refused_by_name(tmp_path: Any) -> None:
    pipe = tiny_pipeline()
    quantised(pipe.transformer)
    with pytest.raises(ValueError, match="Linear of Int8Tensor; only plain linear layers can be joined"):
        fuse_projections(pipe.transformer)
    refuses(
        ValueError, r"transformer are quantised \(Int8Tensor\); leave the adapter unfused", pipe.fuse_lora
    )
    with pytest.raises(ValueError, match="quantised .Int8Tensor. after it was loaded.*quantization_config="):
        pipe.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(ValueError, match="LlamaGenTransformer are quantised .Int8Tensor.*no gradient"):
        Trainer(pipe.transformer, RunSettings(), tmp_path, lambda loss, step: None, every=10)


def test_adapters_work_on_quantised_weights() -> None:
    pytest.importorskip("peft")
    pipe = tiny_pipeline()
    quantised(pipe.transformer)

    def ids() -> Tensor:
        return pipe("a red circle", generator=seeded(0)).tokens

    before = ids()
    sizes = {"A": (2, 16), "B": (48, 2)}
    adapter = {
        f"layers.0.attention.wqkv.lora_{part}.weight": torch.randn(size, generator=seeded(3)[0])
        for part, size in sizes.items()
    }
    pipe.load_lora_weights(adapter, "mine")
    assert not torch.equal(ids(), before) and pipe.last_trace.quantised == "Int8Tensor"
    pipe.unload_lora_weights()
    assert torch.equal(ids(), before)


def test_rows_of_zeros_that_e4m3_makes_nan_are_refused(tmp_path: Any) -> None:
    model = tiny_transformer()
    with torch.no_grad():
        model.output.weight.zero_()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="damaged: .* values of output.weight are nan or infinite in float8_e4m3fn"
    ):
        type(model).from_pretrained(
            tmp_path, quantization_config=TorchAoConfig(config_of("Float8Tensor")), torch_dtype=torch.float32
        )
