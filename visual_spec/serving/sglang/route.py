"""The server that SGLang asks for the tokens of GLM-Image: `POST /generate` and `GET /health`.

SGLang draws GLM-Image in two stages. Started with `--srt-encoder-url`, it asks another server for the tokens of the
first: it posts `input_ids`, `image_data` with the grids, and `sampling_params` with a seed, one of each or a list of
them, and reads `output_ids` (sglang 0.5.23, multimodal_gen/.../model_specific_stages/glm_image.py). Here a window of
speculative Jacobi decoding draws them: the tokens of one call a token, for the seed.
"""

# pyright: reportMissingImports=false
# FastAPI is installed with the extras that serve only.
from __future__ import annotations

import asyncio
import json
import logging
import random
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import visual_spec
from visual_spec.models.core.settings import LAW_DEFAULTS, SEED, Within, whole
from visual_spec.pipelines.accelerate.images import image_model_class
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.serving.answers import RefusedError
from visual_spec.serving.asked import Limits
from visual_spec.serving.http import body_of

logger = logging.getLogger(__name__)

_BODY = 1 << 20  # bytes of a request
_SETTINGS = ("temperature", "top_k", "top_p", "sampling_seed", "max_new_tokens", "ignore_eos")


@dataclass(frozen=True)
class PriorRequest:
    """The tokens of one picture.

    Attributes:
        ids: of the prompt.
        grids: (height, width) of the grids, as the processor of GLM-Image gives them: the large one first.
        law: how logits become the law of a token.
        seed: of the noise.
    """

    ids: tuple[int, ...]
    grids: tuple[tuple[int, int], ...]
    law: TokenLaw
    seed: int


class PriorTokens:
    """Draws the tokens of the first stage of a GLM-Image of transformers.

    Args:
        model: a `GlmImageForConditionalGeneration`. It is accelerated, if it is not yet.
        sampler: text of a sampler.
        pictures: of a request.
        places: tokens of a picture, all grids together.

    Raises:
        TypeError: another model.
    """

    def __init__(
        self,
        model: Any,
        sampler: str = "speculative-jacobi:window=32",
        *,
        pictures: int = 64,
        places: int = 8192,
    ) -> None:
        kind = image_model_class(model)
        if kind is None or kind.family != "GLM-Image":
            raise TypeError(f"{type(model).__name__} given; SGLang asks for tokens of a GLM-Image.")
        self.model, self.pictures, self.places = model, pictures, places
        visual_spec.accelerate(model, sampler)

    def read(self, asked: object) -> list[PriorRequest]:
        """Return what a posted body asks for: one picture, or several.

        Raises:
            ValueError: what is missing, unknown, or out of range.
        """
        if not isinstance(asked, dict):
            raise ValueError(f"the body is a {type(asked).__name__}; send an object with input_ids.")
        if unknown := sorted(asked.keys() - {"input_ids", "image_data", "sampling_params", "rid", "stream"}):
            raise ValueError(f"{unknown[0]} is unknown; pass input_ids, image_data and sampling_params.")
        if asked.get("stream"):
            raise ValueError("stream=true; tokens are sent when all are drawn, leave it out.")
        ids, grids, params = (asked.get(name) for name in ("input_ids", "image_data", "sampling_params"))
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"input_ids={str(ids)[:40]}; pass a list of token ids, or a list of such lists.")
        if not isinstance(ids[0], list):  # one picture
            ids, grids, params = [ids], [grids], [params]
        if len(ids) > self.pictures:
            raise ValueError(f"{len(ids)} pictures asked for; pass at most {self.pictures}.")
        params = params if isinstance(params, list) else [params] * len(ids)
        if not isinstance(grids, list) or not len(ids) == len(grids) == len(params):
            raise ValueError("input_ids, image_data and sampling_params are of different lengths.")
        return [self._one(*one) for one in zip(ids, grids, params, strict=True)]

    def draw(self, requests: list[PriorRequest]) -> list[dict[str, Any]]:
        """Return an answer for each request: those of the same grids and law are drawn as one batch."""
        answers: list[dict[str, Any]] = [{}] * len(requests)
        batches: dict[tuple[object, ...], list[int]] = {}
        for at, request in enumerate(requests):
            batches.setdefault((request.grids, request.law), []).append(at)
        for places in batches.values():
            for at, answer in zip(places, self._draw([requests[at] for at in places]), strict=True):
                answers[at] = answer
        return answers

    def _one(self, ids: object, images: object, params: object) -> PriorRequest:
        text = self.model.config.text_config
        room, words = text.max_position_embeddings, text.vocab_size
        if not isinstance(ids, list) or not 0 < len(ids) <= room:
            raise ValueError(f"input_ids of one picture are {str(ids)[:40]}; pass 1 to {room} token ids.")
        ids = tuple(whole("input_ids", one, Within(0, words - 1)) for one in ids)
        grids = self._grids(images)
        if not isinstance(params, dict):
            raise ValueError(f"sampling_params={str(params)[:40]}; pass an object for each picture.")
        if unknown := sorted(params.keys() - {*_SETTINGS}):
            raise ValueError(f"{unknown[0]} in sampling_params; pass {', '.join(_SETTINGS)}.")
        tokens = sum(height * width for height, width in grids)
        most = whole("max_new_tokens", params.get("max_new_tokens", tokens + 1), Within(1))
        if most < tokens:
            raise ValueError(f"max_new_tokens={most}, but the grids have {tokens} tokens; pass {tokens + 1}.")
        seed = params.get("sampling_seed")
        seed = random.SystemRandom().randrange(2**32) if seed is None else whole("sampling_seed", seed, SEED)
        settings = {name: params[name] for name in LAW_DEFAULTS if params.get(name) is not None}
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in settings.values()):
            raise ValueError(f"sampling_params={str(settings)[:80]}; pass numbers.")
        if settings.get("top_k") == -1:  # SGLang's word for none
            del settings["top_k"]
        return PriorRequest(ids, grids, TokenLaw(**settings), seed)

    def _grids(self, images: Any) -> tuple[tuple[int, int], ...]:
        """The grids of `[{"image_grid_thw": [[1, height, width], ...]}]`."""
        try:
            (image,) = images
            if image.keys() != {"image_grid_thw"}:
                raise KeyError
            grids = tuple(
                (whole("height", height, Within(1)), whole("width", width, Within(1)))
                for _, height, width in image["image_grid_thw"]
            )
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"image_data={str(images)[:60]}; pass [{{'image_grid_thw': [[1, height, width], ...]}}], the grids to "
                "draw. Pictures in the prompt are not taken."
            ) from error
        tokens = sum(height * width for height, width in grids)
        if not 0 < tokens <= self.places:
            raise ValueError(f"the grids {grids} have {tokens} tokens; pass 1 to {self.places}.")
        return grids

    def _draw(self, requests: list[PriorRequest]) -> list[dict[str, Any]]:
        """Draw a batch of one law and the same grids."""
        law, grids = requests[0].law, requests[0].grids
        longest, pad = max(len(one.ids) for one in requests), self.model.config.text_config.pad_token_id
        before = [longest - len(one.ids) for one in requests]
        ids = torch.tensor(
            [[pad or 0] * left + list(one.ids) for left, one in zip(before, requests, strict=True)]
        )
        mask = torch.tensor([[0] * left + [1] * (longest - left) for left in before])
        drawn = self.model.generate_images(
            ids.to(self.model.device),
            mask.to(self.model.device),
            image_grid_thw=torch.tensor([[1, *grid] for grid in grids], device=self.model.device),
            do_sample=law.temperature > 0,
            **(
                {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
                if law.temperature
                else {}
            ),
            generator=[torch.Generator().manual_seed(one.seed) for one in requests],
        )
        calls = self.model.last_trace.target_calls.tolist()
        return [
            {
                "output_ids": row,
                "meta_info": {
                    "prompt_tokens": len(one.ids),
                    "completion_tokens": len(row),
                    "finish_reason": {"type": "length", "length": len(row)},
                    "sampling_seed": one.seed,
                    "target_calls": cost,
                },
            }
            for one, row, cost in zip(requests, drawn[:, longest:].tolist(), calls, strict=True)
        ]


def make_app(tokens: PriorTokens, queue: int = 64) -> FastAPI:
    """Return the application. Requests are drawn one after another; more than `queue` of them at once get 503."""
    app = FastAPI(title="visual-spec", docs_url=None, redoc_url=None, openapi_url=None)
    turn, waiting = asyncio.Lock(), 0

    def refused(status: int, message: str) -> Response:
        headers = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse({"error": {"message": message}}, status, headers)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        nonlocal waiting
        try:
            asked = json.loads(await body_of(request, _BODY, Limits.read))
            requests = tokens.read(asked)
        except RefusedError as error:
            return refused(error.status, str(error))
        except (ValueError, RecursionError) as error:
            return refused(400, str(error))
        if waiting >= queue:
            return refused(503, f"{waiting} requests are waiting, of at most {queue}; try again later.")
        waiting += 1
        try:
            async with turn:
                answers = await asyncio.to_thread(tokens.draw, requests)
        except ValueError as error:
            return refused(400, str(error))
        except Exception as error:
            seeds = [one.seed for one in requests]
            logger.error("a request failed, seeds %s", seeds, exc_info=error)
            return refused(500, f"{error} Seeds: {seeds}; the same tokens come for the same ones.")
        finally:
            waiting -= 1
        return JSONResponse(answers if isinstance(asked["input_ids"][0], list) else answers[0])

    return app
