"""A `Painter` that draws by Ray Serve: any pipeline of pictures, on as many replicas as Ray keeps.

Batching, replicas, autoscaling and the restart of a lost replica are Ray's. A replica says that it is ill when a batch
takes too long; Ray then ends it and starts another. A picture depends on its prompt, law and seed only, so one that was
lost with its replica is asked for once more, and comes out the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from types import ModuleType
from typing import Any

import torch

from visual_spec.files.extras import extra
from visual_spec.models.core.settings import LAW_DEFAULTS
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.painter import Drawn, Order, png_of

_TRIES = 3  # of a picture whose replica was lost


def require_serve() -> ModuleType:
    """Return the module `ray.serve`.

    Raises:
        ImportError: Ray Serve is missing.
    """
    with extra("serve", "--engine ray needs Ray Serve"):
        from ray import serve  # pyright: ignore[reportMissingImports]
    return serve


class Replica:
    """The pipeline in a replica; a batch of orders at a time.

    Args:
        model: as for `load_pipeline`.
        sampler: text of a sampler; None: the fast one that returns the same tokens.
        device, threads: where it computes; None: PyTorch's choice.
        step: most seconds of a batch.
    """

    def __init__(
        self, model: str, sampler: str | None, device: str | None, threads: int | None, step: float
    ) -> None:
        from visual_spec.pipelines.accelerate import accelerate
        from visual_spec.pipelines.placing import load

        self.pipe = accelerate(load(model, device, "float32", threads), sampler)
        self.step = step
        self.begun: list[float] = []  # when the batches at work began

    def check_health(self) -> None:
        """Raise RuntimeError if a batch takes too long: Ray asks, and then starts another replica."""
        if self.begun and (seconds := time.monotonic() - min(self.begun)) > self.step:
            raise RuntimeError(f"a batch has taken {seconds:.0f} seconds, more than {self.step:g}")

    async def facts(self) -> dict[str, Any]:
        """Return the size of its pictures and the law's defaults."""
        return {"size": self.pipe.image_size, "law": self.pipe.default_settings()}

    async def draw(self, orders: list[Order]) -> list[Drawn | Exception]:
        """Return a `Drawn` for each order, or the error that refuses it."""
        begun = time.monotonic()
        self.begun.append(begun)
        try:
            return await self._answers(orders)
        finally:
            self.begun.remove(begun)

    async def _answers(self, orders: list[Order]) -> list[Drawn | Exception]:
        groups: dict[TokenLaw, list[int]] = defaultdict(list)
        for index, order in enumerate(orders):
            groups[order.law].append(index)
        answers: list[Any] = [None] * len(orders)
        for law, members in groups.items():
            drawn = await asyncio.to_thread(self._draw, [orders[index] for index in members], law)
            for index, answer in zip(members, drawn, strict=True):
                answers[index] = answer
        return answers

    def _draw(self, orders: list[Order], law: TokenLaw) -> list[Drawn | Exception]:
        generators = [torch.Generator().manual_seed(order.seed) for order in orders]
        try:
            prompts = [order.prompt for order in orders]
            drawn = self.pipe(
                prompts, generator=generators, **{name: getattr(law, name) for name in LAW_DEFAULTS}
            )
        except (ValueError, TypeError) as error:
            # One bad prompt must not refuse the others of its batch.
            return [error] if len(orders) == 1 else [self._draw([order], law)[0] for order in orders]
        calls = drawn.trace.target_calls.tolist()
        return [
            Drawn(png_of(image), facts={"calls": count, "tokens": int(tokens.numel())})
            for image, count, tokens in zip(drawn.images, calls, drawn.tokens, strict=True)
        ]


class RayPainter:
    """Draws by a Ray Serve deployment of `Replica`.

    Args:
        model, sampler, device, threads: as for `Replica`.
        replicas: how many; "auto": Ray's autoscaling decides.
        batch: the most pictures of one call of the pipeline.
        wait: seconds that an order waits for others.
        step: most seconds of a batch.
        options: of the deployment, such as `ray_actor_options={"num_gpus": 1}`.
    """

    def __init__(
        self,
        model: str,
        *,
        sampler: str | None = None,
        replicas: int | str = 1,
        batch: int = 8,
        wait: float = 0.02,
        step: float = 300,
        device: str | None = None,
        threads: int | None = None,
        **options: Any,
    ) -> None:
        serve = require_serve()
        serve.start(proxy_location="Disabled")  # the endpoint is ours
        batched = serve.batch(max_batch_size=batch, batch_wait_timeout_s=wait)
        deployed = type("VisualSpecReplica", (Replica,), {"draw": batched(Replica.draw)})
        deployment = serve.deployment(num_replicas=replicas, max_ongoing_requests=4 * batch, **options)(
            deployed
        )
        app = deployment.bind(model, sampler, device, threads, step)
        self.asked = 0  # pictures that wait for Ray
        self.heard = 0.0  # when it last answered, or the first of these was asked for
        self.silent = 0.0  # seconds that pictures had waited since its last answer when they were given up
        self.lost: str | None = None
        self.serve, self.name = serve, model
        self.handle = serve.run(app, name="visual-spec", route_prefix=None)
        facts = self.handle.facts.remote().result()
        self.size, self.defaults = tuple(facts["size"]), facts["law"]

    def law(self, **settings: Any) -> TokenLaw:
        return TokenLaw(
            **self.defaults | {name: value for name, value in settings.items() if value is not None}
        )

    def check(self, order: Order) -> None:
        """Refuse partial pictures, which a replica does not send. Prompts are refused by the pipeline."""
        if order.partial:
            raise ValueError(f"partial_images={order.partial}; this model shows whole pictures only. Pass 0.")

    async def draw(self, order: Order) -> AsyncGenerator[Drawn, None]:
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        for left in reversed(range(_TRIES)):
            if not self.asked:
                self.heard = time.monotonic()
            self.asked += 1
            asked = self.handle.draw.remote(order)
            try:
                answer = await asked
            except asyncio.CancelledError:
                asked.cancel()
                if self.asked == 1:
                    self.silent += time.monotonic() - self.heard  # to give up is no answer
                raise
            except RayActorError as error:
                self._answered()
                if not left:
                    self.lost = f"a picture lost its replica {_TRIES} times ({type(error).__name__})"
                    raise
                continue
            except Exception:
                self._answered()
                raise
            finally:
                self.asked -= 1
            self._answered()
            if isinstance(answer, Exception):
                raise answer
            yield answer
            return

    def fault(self, step: float) -> str | None:
        """Return why nothing is drawn any more: a picture that took down its replicas, or no answer of Ray to any
        picture, for as long as it may take to draw one again on each new replica."""
        waited = self.silent + time.monotonic() - self.heard if self.asked else 0.0
        if self.lost is None and waited > (_TRIES + 1) * step:
            self.lost = f"Ray has not answered for {waited:.0f} seconds"
        return self.lost

    def _answered(self) -> None:
        self.heard, self.silent = time.monotonic(), 0.0
