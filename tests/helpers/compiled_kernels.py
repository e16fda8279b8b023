"""Triton kernels compiled for a GPU that this machine need not have."""

import re
import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

triton = pytest.importorskip("triton")


class Recorder:
    """In the place of a kernel: keeps what it is launched with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.args, self.kwargs = args, kwargs

        return launch


def compiled(module: Any, name: str, call: Any) -> Any:
    """A kernel as `call` launches it, compiled for an H100 or H200; other kernels of its module are not launched."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, recorder = getattr(module, name), Recorder()
    with pytest.MonkeyPatch.context() as patch:
        for other in [other for other in vars(module) if other.endswith("_kernel")]:
            patch.setattr(module, other, recorder if other == name else Recorder())
        call()
    named = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
    options = {name: recorder.kwargs.pop(name) for name in named if name in recorder.kwargs}
    names = {
        torch.float64: "fp64",
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float8_e4m3fn: "fp8e4nv",
        torch.int8: "i8",
        torch.int64: "i64",
        torch.int32: "i32",
        torch.bool: "i1",
    }
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = dict(recorder.kwargs)
    attributes: dict[tuple[int, ...], Any] = {}

    def described(value: Any, path: tuple[int, ...], specialized: bool) -> Any:
        """A type, as a launch says it: what is divisible by 16 is known to be, and a 1 is a constant."""
        if isinstance(value, tuple):
            return tuple(described(one, (*path, at), specialized) for at, one in enumerate(value))
        if isinstance(value, float):
            return "fp32"
        if value is None:
            constants[path] = None
            return "constexpr"
        if type(value) is int and value == 1 and specialized:
            constants[path] = 1
            return "constexpr"
        if isinstance(value, Tensor) or (value % 16 == 0 and specialized):
            attributes[path] = [["tt.divisibility", 16]]
        return "*" + names[value.dtype] if isinstance(value, Tensor) else "i32" if value < 2**31 else "i64"

    for index, (parameter, value) in enumerate(zip(kernel.params, recorder.args, strict=False)):
        signature[parameter.name] = described(value, (index,), not parameter.do_not_specialize)
    signature |= dict.fromkeys(recorder.kwargs, "constexpr")
    assert list(signature) == kernel.arg_names
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check_compiles(folder: Any, module: Any, name: str, call: Any) -> Any:
    """As `compiled`; its registers suffice."""
    binary = compiled(module, name, call)
    assert "cubin" in binary.asm and spilled(binary, folder) == 0
    return binary


def spilled(binary: Any, folder: Any) -> int:
    """Bytes that the assembler moves between registers that are too few and memory.

    PTX has registers without end, so nothing of this can be seen there.
    """
    said = _assembled(binary, folder)
    found = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert len(found) == 2, said
    return sum(map(int, found))


def registers(binary: Any, folder: Any) -> int:
    """Registers of a thread, by the assembler's count."""
    (found,) = re.findall(r"Used (\d+) registers", _assembled(binary, folder))
    return int(found)


def _assembled(binary: Any, folder: Any) -> str:
    """What the assembler says of a kernel."""
    (folder / "kernel.ptx").write_text(binary.asm["ptx"])
    assembler = triton.knobs.nvidia.ptxas.path
    command = [assembler, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def check_traced(op: Any, arguments: Any, expected: Any = None, *, strides: bool = False) -> None:
    """Tracers of GPU code know an operator by shape and dtype, without a launch.

    Args:
        expected: tensors like those that it returns; None: what it returns on the CPU.
        strides: whether strides are those of the CPU, too.
    """

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    def looks(value: Tensor) -> tuple[Any, ...]:
        return value.shape, value.dtype, value.stride() if strides else None

    expected = op(*arguments) if expected is None else expected
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = op(*tree_map(there, tuple(arguments)))
    found, expected = (one if isinstance(one, tuple) else (one,) for one in (found, expected))
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cuda" and looks(one) == looks(other)
