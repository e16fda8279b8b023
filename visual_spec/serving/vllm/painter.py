"""A `Painter` that draws by vLLM, in one process: pictures of all requests in one engine, pairs entering together."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in an environment of its own only.
from __future__ import annotations

import asyncio
import logging
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from visual_spec.pipelines.output import shown
from visual_spec.pipelines.streaming import with_grey
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.painter import BrokenError, Drawn, Order, png_of
from visual_spec.serving.vllm.engine import check_whole, engine_arguments, requests_of
from visual_spec.serving.vllm.folder import PromptIds, save_for_vllm

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from visual_spec.pipelines.image import ImagePipeline

logger = logging.getLogger(__name__)


@dataclass
class _Job:
    """An order in the engine. `news` gets the tokens that it has, after calls, or what ended it."""

    number: int
    order: Order
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[list[int] | Exception] = field(default_factory=asyncio.Queue)
    names: list[str] = field(default_factory=list)
    calls: int = 0
    drafts: int = 0
    held: int = 0  # tokens, after the last call

    def tell(self, what: list[int] | Exception) -> None:
        self.loop.call_soon_threadsafe(self.news.put_nowait, what)


class VllmPainter:
    """Draws by one engine, in a thread of its own. What vLLM schedules it schedules; this only lets pairs in together.

    An engine whose step failed is not used again: after an error of a GPU, every later call fails too.

    Args:
        pipe: an `ImagePipeline` whose transformer vLLM serves (`save_for_vllm`); it encodes prompts and decodes tokens.
        window: W of the windows; 1: none.
        pictures: pictures in the engine at once; the next ones wait.
        more: arguments of vLLM.

    Raises:
        ValueError: as `save_for_vllm` and `start.check_start`.
    """

    def __init__(
        self, pipe: ImagePipeline, name: str, *, window: int = 32, pictures: int = 8, **more: Any
    ) -> None:
        self.pipe, self.name, self.size = pipe, name, pipe.image_size
        self.ids = PromptIds(pipe.transformer, getattr(pipe, "text_encoder", None))
        self.length, self.pictures, self.window = pipe.transformer.grid.num_tokens, pictures, window
        with tempfile.TemporaryDirectory() as folder:
            save_for_vllm(pipe, folder)
            arguments = engine_arguments(folder, window=window, requests=2 * pictures, **more)
            self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._asked: queue.Queue[tuple[str, _Job | None]] = queue.Queue()
        self._waiting: deque[_Job] = deque()
        self._jobs: dict[int, _Job] = {}
        self._number = 0
        self._since: float | None = None  # when the work at hand began
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def law(self, **settings: Any) -> TokenLaw:
        return self.pipe.make_law(**settings)

    def check(self, order: Order) -> None:
        requests_of(self.ids, order.prompt, order.seed, order.law, self.length, "check")

    async def draw(self, order: Order) -> AsyncGenerator[Drawn, None]:
        self._number += 1
        job = _Job(self._number, order, asyncio.get_running_loop())
        self._asked.put(("draw", job))
        shown, finished = 0, False
        try:
            if self._fault:  # set before the thread reads for the last time, so nobody waits for ever
                raise BrokenError(self._fault)
            while not finished:
                tokens = await job.news.get()
                if isinstance(tokens, Exception):
                    raise tokens
                finished = len(tokens) == self.length
                share = len(tokens) * (order.partial + 1) // self.length
                if finished or share > shown:
                    shown = share
                    facts = {"calls": job.calls, "tokens": len(tokens), "drafts": job.drafts}
                    yield Drawn(await asyncio.to_thread(self._png, tokens), finished, facts)
        finally:
            if not finished:
                self._asked.put(("give up", job))

    def fault(self, step: float) -> str | None:
        since = self._since
        if self._fault is None and since is not None and time.monotonic() - since > step:
            self._fault = f"a step of vLLM takes more than {step:g} s"
        elif self._fault is None and not self._thread.is_alive():
            self._fault = "the thread of vLLM has ended"
        return self._fault

    def close(self) -> None:
        self._asked.put(("close", None))
        self._thread.join(10)

    @torch.no_grad()  # in a thread of its own, where gradients are on
    def _png(self, tokens: list[int]) -> bytes:
        """The picture of the tokens that there are, grey where there are none yet."""
        padded = torch.tensor([tokens + [tokens[-1]] * (self.length - len(tokens))])
        pixels = self.pipe.decode_tokens(padded, "pt")
        is_open = torch.arange(self.length)[None] >= len(tokens)
        patch = pixels.shape[-1] // self.pipe.transformer.grid.width
        return png_of(shown(2 * with_grey(pixels, is_open, patch) - 1, self.pipe.image_processor, "pil")[0])

    # -- the thread of the engine ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read():
                self._since = time.monotonic()
                self._enter()
                if self._jobs:
                    for output in self.engine.step():
                        self._tell(output)
                self._since = None
            self._fault = self._fault or "the server stops"
        except BaseException as error:  # whatever it is, nobody may wait for a thread that has ended
            logger.exception("vLLM failed")
            self._fault = f"vLLM failed: {type(error).__name__}: {error}"
        self._since = None
        left = [*self._jobs.values(), *self._waiting]
        while not self._asked.empty():
            what, job = self._asked.get()
            left += [job] if job is not None and what == "draw" else []
        for job in left:
            job.tell(BrokenError(self._fault))

    def _read(self) -> bool:
        """Read what was asked; waits if there is nothing else to do. Returns whether to go on."""
        while True:
            try:
                what, job = self._asked.get(block=not self._jobs and not self._waiting)
            except queue.Empty:
                return True
            if job is None:
                return False
            if what == "draw":
                self._waiting.append(job)
            elif job in self._waiting:
                self._waiting.remove(job)
            elif self._jobs.pop(job.number, None) is not None:
                self.engine.abort_request(job.names)

    def _enter(self) -> None:
        while self._waiting and len(self._jobs) < self.pictures:
            job = self._waiting.popleft()
            order, pair = job.order, f"{job.number}"
            try:
                members = requests_of(self.ids, order.prompt, order.seed, order.law, self.length, pair)
                for member, (prompt, params) in enumerate(members):
                    params.output_kind = (
                        RequestOutputKind.FINAL_ONLY if member else RequestOutputKind.CUMULATIVE
                    )
                    self.engine.add_request(f"{pair}/{member}", prompt, params)  # type: ignore[arg-type]
                    job.names.append(f"{pair}/{member}")
            except Exception as error:  # vLLM refuses it, by a class of its own; the others go on
                self.engine.abort_request(job.names)
                job.tell(ValueError(str(error)))
            else:
                self._jobs[job.number] = job

    def _tell(self, output: RequestOutput) -> None:
        number, member = map(int, output.request_id.split("/"))
        job = self._jobs.get(number)
        if job is None or member:
            return
        tokens = list(output.outputs[0].token_ids)
        if job.calls:  # the first has none; the last token of a call is no draft
            job.drafts += min(self.window - 1, self.length - job.held - 1)
        job.calls, job.held = job.calls + 1, len(tokens)
        if output.finished:
            del self._jobs[number]
            try:
                check_whole(tokens, self.length)
            except RuntimeError as error:
                job.tell(error)
                return
        job.tell(tokens)
