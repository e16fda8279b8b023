"""`quantization_config` at loading: weights of torchao are checked, drawn with, saved and loaded again."""

from __future__ import annotations

import pytest
import torch
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.quantizers.quantization_config import TorchAoConfig
from torch import Tensor

from tests.helpers.tiny import quiet
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.saved import check_finite, stored_parts
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.loading import load_pipeline


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


def by_torchao() -> PipelineQuantizationConfig:
    quantization = pytest.importorskip("torchao.quantization")
    how = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return PipelineQuantizationConfig(quant_mapping={"transformer": how})


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
