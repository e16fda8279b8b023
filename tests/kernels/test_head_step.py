"""One level of a diffusion head: definition, operator and kernels against a computation row by row."""

from typing import Any

import pytest
import torch

from tests.helpers.compiled_kernels import check_compiles, check_traced, compiled, spilled
from tests.kernels.heads import case
from visual_spec.kernels import head_step as module
from visual_spec.kernels.head_step import head_step, head_step_reference


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(guided=False),
        dict(learned=False),
        dict(one_law=True, noisy=False),
        dict(dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_definition(settings):
    here = case(4, 3, 24, 2, **settings)
    near: dict[str, Any] = dict(rtol=5e-2, atol=5e-2) if "dtype" in settings else dict(rtol=1e-5, atol=1e-5)
    for function in (head_step_reference, head_step):
        for found, expected in zip(function(*here.arguments), here.expected, strict=True):
            torch.testing.assert_close(found, expected.float(), **near)


def test_a_deterministic_level_returns_two_tensors():
    """An operator's outputs must not share memory."""
    here = case(2, 3, 24, 1, noisy=False)
    point, mean, _ = head_step(*here.arguments)
    assert torch.equal(point, mean) and point.data_ptr() != mean.data_ptr()


def test_shapes_that_do_not_fit_are_refused():
    x, modulations, weights, scales, law, noise = case(4, 3, 24, 2).arguments
    wrong = {
        r"points.*\(4, 2\)": (x[:, :2], modulations, weights, scales, law, noise),
        "and 15 weights": (x, modulations, weights[:-1], scales, law, noise),
        r"\(4, 192\)": (x, modulations[:4], weights, scales, law, noise),
        r"law.*\(3, 5\)": (x, modulations, weights, scales, law[:3], noise),
        r"scales.*\(4, 1\)": (x, modulations, weights, scales[:, None], law, noise),
        r"noise.*\(1, 3\)": (x, modulations, weights, scales, law, noise[:1]),
        "has 4 outputs": (
            x,
            modulations,
            [*weights[:-2], weights[-2][:4], weights[-1][:4]],
            scales,
            law,
            noise,
        ),
    }
    for text, arguments in wrong.items():
        with pytest.raises(ValueError, match=text):
            head_step(*arguments)


def test_the_operator_is_known_to_tracers_of_gpu_code():
    check_traced(torch.ops.visual_spec.head_step, case(4, 3, 24, 2).arguments)


@pytest.mark.fast_sets(6)
@pytest.mark.parametrize("rows", [2, 128])
@pytest.mark.parametrize("kernel", ["_up_kernel", "_down_kernel", "_final_kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_for_hopper(tmp_path, kernel, dtype, rows):
    pytest.importorskip("triton")
    here = case(rows // 2, 16, 64, 2, dtype=dtype)
    check_compiles(tmp_path, module, kernel, lambda: module.head_step_triton(*here.arguments))


@pytest.mark.slow
@pytest.mark.parametrize("width", [1024, 1280, 1536])
def test_compiles_at_the_sizes_of_official_heads(tmp_path, width):
    """The first block, whose kernels project the points as well: the last launch of a head of one block."""
    pytest.importorskip("triton")
    x, _, _, scales, law, noise = case(64, 16, 64, 1, dtype=torch.bfloat16).arguments
    shapes = [(width, 16), width, width, width, (width, width), width, (width, width), width, (32, width), 32]
    weights = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    modulations = torch.zeros(128, 5 * width, dtype=torch.bfloat16)
    for kernel in ("_up_kernel", "_down_kernel"):
        binary = compiled(
            module, kernel, lambda: module.head_step_triton(x, modulations, weights, scales, law, noise)
        )
        assert spilled(binary, tmp_path) == 0
