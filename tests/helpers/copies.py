"""A copy or a pickle of an accelerated object is plain, stands alone, and can be accelerated; the first one goes on."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import visual_spec


def modules_of(thing: Any) -> list[nn.Module]:
    parts = [thing, *getattr(thing, "components", {}).values()]
    return [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]


def names_of(thing: Any) -> list[set[str]]:
    """What each object holds of its own."""
    return [set(vars(thing)), *(set(vars(module)) for module in modules_of(thing))]


def tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [tensor for value in values for tensor in tensors(value)]


def unpickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def check_copy(thing: Any, run: Callable[[Any], Any], copied: Callable[[Any], Any], **options: Any) -> None:
    """Check it for one kind of copies.

    Args:
        thing: not accelerated; its weights are changed.
        run: what an accelerated one makes, the same each time.
        options: of `accelerate`.
    """
    with torch.no_grad():
        run(visual_spec.accelerate(thing, **options))
        before = names_of(visual_spec.restore(thing))  # with what the library keeps after a call
        try:
            copied(thing)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"no plain one can be copied so: {error}")
        wanted = tensors(run(visual_spec.accelerate(thing, **options)))
        other = copied(thing)
        # The sampler of a pipeline of ours is one of its components, and so of the copy's.
        assert isinstance(thing, visual_spec.ImagePipeline) or names_of(other) == before
        assert all(map(torch.equal, tensors(run(thing)), wanted))
        assert names_of(visual_spec.restore(thing)) == before
        for module in modules_of(thing):
            for parameter in module.parameters():
                parameter.zero_()
        assert all(map(torch.equal, tensors(run(visual_spec.accelerate(other, **options))), wanted))
    assert names_of(visual_spec.restore(visual_spec.restore(other))) == before
