"""What Ray is told of a replica that hangs, and when the painter gives up, with stand-ins for handle and pipeline."""

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.helpers.refusals import refuses
from tests.serving.servers import NEEDS_RAY
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.painter import Order
from visual_spec.serving.ray_painter import RayPainter, Replica

pytestmark = pytest.mark.skipif(bool(NEEDS_RAY), reason=NEEDS_RAY)
ORDER = Order(prompt="a large red circle", seed=0, law=TokenLaw())


def test_a_replica_is_ill_while_a_batch_takes_too_long():
    go_on = threading.Event()

    class Hangs(Replica):
        def __init__(self) -> None:
            self.step, self.begun = 0.1, []

        def _draw(self, orders: list[Order], law: TokenLaw) -> list[Any]:
            go_on.wait(10)
            return ["drawn"] * len(orders)

    async def watched() -> list[Any]:
        replica = Hangs()
        replica.check_health()
        batch = asyncio.create_task(replica.draw([ORDER]))
        await asyncio.sleep(0.02)
        replica.check_health()
        await asyncio.sleep(0.2)
        refuses(RuntimeError, r"a batch has taken 0 seconds, more than 0\.1", replica.check_health)
        go_on.set()
        drawn = await batch
        replica.check_health()
        return drawn

    assert asyncio.run(watched()) == ["drawn"]


class Handle:
    """Of a deployment; `answers` in turn: errors are raised, the others are waited for and returned."""

    def __init__(self, *answers: Any) -> None:
        self.draw, self.answers = self, list(answers)

    def remote(self, order: Order) -> Any:
        async def answer() -> Any:
            given = self.answers.pop(0)
            if isinstance(given, Exception):
                raise given
            await asyncio.sleep(given)
            return "drawn"

        return asyncio.create_task(answer())


def painter(*answers: Any) -> RayPainter:
    made = RayPainter.__new__(RayPainter)
    made.handle, made.asked, made.heard, made.silent, made.lost = Handle(*answers), 0, 0.0, 0.0, None
    return made


async def drawn(by: RayPainter) -> list[Any]:
    return [one async for one in by.draw(ORDER)]


def test_a_picture_that_takes_down_three_replicas_is_the_end():
    from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

    lost = RayActorError()
    survives, ends = painter(lost, lost, 0.0), painter(lost, lost, lost)
    assert asyncio.run(drawn(survives)) == ["drawn"] and survives.fault(1) is None
    with pytest.raises(RayActorError):
        asyncio.run(drawn(ends))
    assert ends.fault(1) == "a picture lost its replica 3 times (RayActorError)"


def test_a_ray_that_answers_nothing_is_the_end():
    async def watched() -> None:
        quiet = painter(0.0, 5.0, 0.2)
        await drawn(quiet)
        await asyncio.sleep(0.3)
        assert quiet.fault(0.05) is None  # nobody waits
        waiting = asyncio.create_task(drawn(quiet))
        await asyncio.sleep(0.1)
        assert quiet.fault(0.05) is None
        await asyncio.sleep(0.2)
        assert quiet.fault(0.05) == "Ray has not answered for 0 seconds"
        waiting.cancel()

    began = time.monotonic()
    asyncio.run(watched())
    assert time.monotonic() - began < 4


def test_to_give_up_is_no_answer_of_ray():
    """Requests that run into their limit of time, one after the other; time without requests does not count."""

    async def watched() -> tuple[str | None, str | None]:
        quiet = painter(5.0, 5.0, 5.0, 0.0)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(drawn(quiet), 0.15)
            await asyncio.sleep(0.3)
            assert quiet.fault(0.05) is None  # nobody waits
        waiting = asyncio.create_task(drawn(quiet))
        await asyncio.sleep(0.02)
        early, late = quiet.fault(0.2), quiet.fault(0.05)
        waiting.cancel()
        return early, late

    assert asyncio.run(watched()) == (None, "Ray has not answered for 0 seconds")
