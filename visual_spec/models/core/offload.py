"""Where weights are: offloaded ones are brought in, those at odd addresses are moved, and a cache has to fit.

The hooks of accelerate (`enable_model_cpu_offload`, `enable_sequential_cpu_offload`) and of diffusers
(`enable_group_offload`, `enable_layerwise_casting`) bring in the weights of a module when its `forward` is called. A
token model has more entry points (`prefill`, `decode_tokens`), and runs the parts of its blocks one by one. Its weights
would then be on the meta device, or of any value, without an error. `at_hand` therefore runs the hooks itself.

A decode calls its model hundreds of times, so weights are brought in once for all calls, and a whole model at a time:
memory has to hold the model that works, as with `enable_model_cpu_offload`, but not the others.

A safetensors file may hold a tensor at any multiple of its item size, and a mapped weight stands where the file has it.
PyTorch's own memory begins at multiples of 64 bytes. At other addresses the products of MKL take other paths on some
processors and round otherwise (3e-14 in float64, measured on an AMD EPYC), so a model that was loaded could differ from
the one that was saved.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor, nn

from visual_spec.models.core.protocol import modules_of

if TYPE_CHECKING:
    from diffusers.hooks.hooks import ModelHook

P = ParamSpec("P")
R = TypeVar("R")

_LOADING = ("GroupOffloadingHook", "LayerwiseCastingHook")  # of diffusers: those that change weights
ALIGNMENT = 64  # bytes; of a cache line, of an AVX-512 register, and of PyTorch's allocator
_AT_HAND: set[int] = set()  # ids of the modules whose weights are there now


@contextmanager
def at_hand(*models: object, leaves: bool = True) -> Iterator[None]:
    """Within, the weights of these models are on their device and in their dtype, whatever offloads them.

    Args:
        models: modules, or adapters that hold some; None is skipped.
        leaves: False leaves a module that accelerate offloads by itself to its own hook, and so in memory only while
            its `forward` runs: for adapters that call each such module by its `forward`.
    """
    with ExitStack() as stack:
        for model in models:
            for root in [] if model is None else modules_of(model):
                if id(root) in _AT_HAND:
                    continue
                hooked = _hooked(root)
                for module in hooked:
                    stack.enter_context(_loaded(module, is_root=module is root, leaves=leaves))
                # Calls of what has no hook, parts of it included, need not look for hooks again.
                clear = {id(root)} if hooked else {id(module) for module in root.modules()}
                clear -= _AT_HAND
                _AT_HAND.update(clear)
                stack.callback(_AT_HAND.difference_update, clear)
        yield


def loads_weights(method: Callable[P, R]) -> Callable[P, R]:
    """Mark an entry point of a model: it runs with the weights `at_hand`."""
    return _entry(method, leaves=True)


def decodes(method: Callable[P, R]) -> Callable[P, R]:
    """Mark an entry point of a decode: it runs with the weights `at_hand`, and without gradients."""
    return loads_weights(torch.no_grad()(method))


def loads_groups(method: Callable[P, R]) -> Callable[P, R]:
    """As `decodes`, of an adapter that calls all leaf modules by their `forward`; see `at_hand`."""
    return _entry(torch.no_grad()(method), leaves=False)


def _entry(method: Callable[P, R], *, leaves: bool) -> Callable[P, R]:
    @functools.wraps(method)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return method(*args, **kwargs)
        roots = [root for root in modules_of(args[0]) if id(root) not in _AT_HAND]
        if not roots:
            return method(*args, **kwargs)
        with at_hand(*roots, leaves=leaves):
            return method(*args, **kwargs)

    return entry


def _hooked(root: nn.Module) -> list[nn.Module]:
    """The modules of a model that have hooks. Runs at every call of a model, so it is kept light."""
    hooked, waiting = [], [root]
    while waiting:
        module = waiting.pop()
        if module is not None:
            own = module.__dict__
            if "_hf_hook" in own or "_diffusers_hook" in own:
                hooked.append(module)
            waiting.extend(own["_modules"].values())
    return hooked


@contextmanager
def _loaded(module: nn.Module, *, is_root: bool, leaves: bool) -> Iterator[None]:
    """Within, the weights that the hooks of one module look after are there, and its `forward` runs no hook."""
    if id(module) in _AT_HAND:
        yield
        return
    hooks = diffusers_hooks(module)
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        offloads = any(getattr(one, "offload", False) is True for one in getattr(hook, "hooks", (hook,)))
        if offloads and leaves:
            hooks.append(hook)
        elif is_root:
            hook.pre_forward(module)  # moves the whole model, which stays until another one is needed
    _AT_HAND.add(id(module))
    forward = module.__dict__.pop("forward", None) if hooks else None
    begun = []
    try:
        for one in reversed(hooks):  # the newest hook is the outermost
            begun.append(one)
            one.pre_forward(module)
            stream = getattr(getattr(one, "group", None), "stream", None)
            if stream is not None:
                stream.synchronize()
        yield
    finally:
        _AT_HAND.discard(id(module))
        if forward is not None:
            module.__dict__["forward"] = forward
        for one in reversed(begun):
            one.post_forward(module, None)


def diffusers_hooks(module: nn.Module) -> list[ModelHook]:
    """The hooks of diffusers on a module that change its weights."""
    registry = getattr(module, "_diffusers_hook", None)
    hooks = [] if registry is None else [registry.hooks[name] for name in registry._hook_order]
    return [hook for hook in hooks if type(hook).__name__ in _LOADING]


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that PyTorch can still allocate: of a GPU, with those it holds unused, or of this machine.

    None elsewhere.
    """
    if device.type == "cpu":
        return psutil.virtual_memory().available
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def check_cache_fits(sample_bytes: int, batch_size: int, device: torch.device) -> None:
    """Refuse a batch whose cache does not fit the device, by ValueError.

    `sample_bytes` are of one sample, its unconditional row included.
    """
    free, needed = free_bytes(device), sample_bytes * batch_size
    if free is not None and needed > free:
        fits = free // sample_bytes
        raise ValueError(
            f"the cache of {batch_size} samples takes {needed / 1e9:.1f} GB, {device} has {free / 1e9:.1f} GB free; "
            + (f"pass at most {fits} samples at a time." if fits else "it has no room for a single one.")
        )


@torch.no_grad()
def align_weights(*models: nn.Module) -> None:
    """Copy the weights that stand at odd addresses into memory of their own, one after the other.

    Parameters stay the same objects, and weights that share memory go on sharing it. Weights that stand well stay
    mapped; those on other devices, on the meta device or in a layout or class of their own (quantised, sharded) are
    left alone. A mapped page is the file's, which the system may drop: what a process needs is one model, not two.

    Args:
        models: modules whose parameters and buffers to look at, together.
    """
    held: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            if _is_plain(tensor):
                held[tensor.untyped_storage().data_ptr()][id(tensor)] = tensor
    while held:
        place, by_id = held.popitem()
        tensors = list(by_id.values())
        if not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
            continue
        if len(tensors) == 1:
            tensors[0].data = tensors[0].detach().clone()
        elif (
            place % ALIGNMENT
        ):  # else they are parts of memory that begins well, at the same places in every load
            _move(tensors)


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor) in (Tensor, nn.Parameter)
    return kind and tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized


def _move(tensors: list[Tensor]) -> None:
    """Copy one storage and put the tensors that lie in it at the same places of the copy."""
    mapped = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    storage = mapped.clone().untyped_storage()
    for tensor in tensors:
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore
