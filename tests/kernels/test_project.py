"""Linear layers of one order of sums: the definition, the operator, and the kernel as it is compiled for Hopper."""

import re
from collections import Counter

import pytest
import torch

from tests.helpers.compiled_kernels import check_compiles, check_traced, compiled, registers
from tests.kernels.projections import KINDS, project_case
from visual_spec.kernels import launch
from visual_spec.kernels import project as module
from visual_spec.kernels.project import project, project_reference, project_triton

# Rows, inputs, outputs and settings of LlamaGen-XL's layers and head; registers of a thread, by the assembler.
LAYERS = {
    "in": (1280, 3840, dict(norm=True), {2: 64, 32: 168, 64: 255}),
    "out": (1280, 1280, dict(residual=True), {2: 80, 32: 128, 64: 255}),
    "gated": (1280, 7168, dict(norm=True, gate=True), {2: 80, 32: 144, 64: 255}),
    "down": (3584, 1280, dict(residual=True), {2: 80, 32: 128, 64: 255}),
    "int8": (1280, 3840, dict(norm=True, weights=torch.int8), {2: 64, 32: 168, 64: 255}),
    "float8": (
        1280,
        7168,
        dict(norm=True, gate=True, weights=torch.float8_e4m3fn),
        {2: 80, 32: 152, 64: 255},
    ),
}


def kernel_of(name: str, rows: int, dtype: torch.dtype = torch.bfloat16, *, early: bool = False):
    """What `compiled` takes: the kernel's module and name, and a call that launches it."""
    inputs, outputs, settings, _ = LAYERS[name]
    given = project_case(rows, inputs=inputs, outputs=outputs, dtype=dtype, **settings).arguments
    return module, "_project_kernel", lambda: project_triton(*given, early=early)


@pytest.mark.parametrize("kind", KINDS)
def test_definition(kind):
    given = project_case(5, dtype=torch.float64, **KINDS[kind])
    torch.testing.assert_close(project_reference(*given.arguments), given.expected, rtol=1e-9, atol=1e-9)


def test_what_does_not_fit_is_refused():
    x, weight = torch.zeros(2, 3, 8), torch.zeros(6, 8)
    wrong = {
        r"\(6, 8\)": lambda: project(x[..., :4], weight),
        r"norm.*\[8\]": lambda: project(x, weight, norm=x[0, 0, :3]),
        r"bias.*\[6\]": lambda: project(x, weight, bias=x[0, 0]),
        "no residual": lambda: project(x, weight, gate=True, residual=torch.zeros(2, 3, 6)),
        "5 outputs": lambda: project(x, weight[:5], gate=True),
        r"residual.*\(2, 3, 6\)": lambda: project(x, weight, residual=x),
        "scale missing": lambda: project(x, weight.to(torch.int8)),
        "scale given": lambda: project(x, weight, scale=torch.ones(6)),
    }
    for text, call in wrong.items():
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match="bfloat16"):
        project(x, weight.bfloat16())
    with pytest.raises(TypeError, match="float32"):
        project(x, weight.to(torch.int8), scale=torch.ones(6).half())


def test_gradients_go_through_the_definition():
    x, weight = project_case(3).arguments[:2]
    project(x, weight.requires_grad_(), norm=torch.ones(600), gate=True).sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_operator_is_known_to_tracers_of_gpu_code(kind):
    check_traced(torch.ops.visual_spec.project, project_case(3, **KINDS[kind]).arguments, strides=True)


@pytest.mark.fast_sets(6)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [64, 2, 32])
def test_compiles_for_hopper(tmp_path, name, rows):
    binary = check_compiles(tmp_path, *kernel_of(name, rows))
    assert registers(binary, tmp_path) <= LAYERS[name][3][rows]
    assert binary.metadata.shared <= 100 * 1024  # two programs a multiprocessor


@pytest.mark.parametrize("name", ["in", "gated"])
def test_float32_compiles_for_hopper(tmp_path, name):
    check_compiles(tmp_path, *kernel_of(name, 32, torch.float32))


@pytest.mark.parametrize("name", ["in", "down", "float8"])
def test_a_block_is_added_up_by_the_same_instructions_for_every_number_of_rows(name):
    """One shape of the tensor cores' instruction, four steps a block, each on the sum of the one before."""
    gate = "gate" in LAYERS[name][2]
    for rows in (1, 2, 32, 64, 128):
        text = compiled(*kernel_of(name, rows)).asm["ptx"]
        assert set(re.findall(r"\w*mma\.\S+", text)) == {
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        }
        steps = re.findall(r"mma\.sync\S+ (\{.*?\}), \{.*?\}, \{.*?\}, (\{.*?\});", text)
        assert all(after == before for after, before in steps)
        most, (outputs, _) = next(
            (most, tile)
            for most, tile in (module._GATED if gate else module._TILES)[2].items()
            if most >= min(rows, 64)
        )
        # Sums of 16 outputs and 8 rows, of a warp that has one lane.
        counts = Counter(after for after, _ in steps)
        assert len(counts) == outputs // 16 * (most // 8) * (1 + gate)
        assert set(counts.values()) == {module.BLOCKS[2] // 16}


def test_dependent_kernels_ask_for_weights_before_they_wait(tmp_path):
    text = check_compiles(tmp_path, *kernel_of("gated", 2, early=True)).asm["ptx"]
    signal, wait = (text.index(f"griddepcontrol.{word}") for word in ("launch_dependents", "wait"))
    reads = [found.start() for found in re.finditer(r"(?:ld|st)\.global|cp\.async\.c[ag]\.shared", text)]
    asked = [found.start() for found in re.finditer(r"prefetch\.global\.L2", text)]
    assert signal < min(asked) and max(asked) < wait < min(reads)  # what others write is read after the wait
    assert "griddepcontrol" not in compiled(*kernel_of("gated", 2)).asm["ptx"]
    assert not launch.dependent(torch.device("cpu"))
