"""visual-spec app: a page on this machine, where plain and accelerated decoding draw side by side.

    visual-spec app                    http://127.0.0.1:7860
    visual-spec app --model DIR        with a model of yours beside the embedded ones

Both sides make a call of the model in turn while one watches; then each draws once more alone, by the clock. The page
opens no file, and draws by the models that were named when it was started.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from visual_spec.commands.options import MACHINE, Parser, add, at_least, is_quiet

if TYPE_CHECKING:
    from PIL.Image import Image

    from visual_spec.pipelines.base import VisualPipeline
    from visual_spec.pipelines.output import ImagePipelineOutput

_PAUSE = 0.1  # seconds from one change of the page to the next
_SIDE = 512  # pixels of the pictures, if they are smaller, and of the map
# Captions in the words of `things` and of `shapes`; the first that a model knows is shown at the start.
_PROMPTS = (
    "a frog above a mushroom on a pink background",
    "a fox left of a pizza on a mint background",
    "a castle on a pink background",
    "a small yellow star left of a large blue square on a striped mint background",
    "a large red circle on a plain sky background",
    "a small white cross inside a large green circle on a dotted pink background",
    "three small purple diamonds on a gradient sand background",
)
_MOST_LETTERS = 2000  # of a prompt

Shown = tuple["Image | None", "Image | None", "Image | None", str]  # plain, accelerated, map, words


def draw(
    load: Callable[[str], VisualPipeline], model: str, prompt: str, sampler: str, seed: float
) -> Iterator[Shown]:
    """Draw one picture twice, plainly and by a sampler, and show both as they grow.

    Args:
        load: the pipeline of a model's name.
        sampler: its text, such as "speculative-jacobi:window=16"; empty: the model's fast one.
        seed: of both pictures.

    Raises:
        ValueError, TypeError: what cannot be drawn; names it.
    """
    import torch

    from visual_spec.pipelines.accelerate import read_sampler

    prompt = prompt or ""  # a menu without a choice has None
    if len(prompt) > _MOST_LETTERS:
        raise ValueError(f"prompt of {len(prompt)} letters; pass at most {_MOST_LETTERS}.")
    if not isinstance(seed, int | float) or seed != seed // 1:
        raise ValueError(f"seed={seed}; pass a whole number, such as 0.")
    pipe = load(model)
    unknown = unknown_words(pipe, prompt)
    plain, fast = copy.copy(pipe), copy.copy(pipe)  # the same models, each with a sampler of its own
    plain.sampler = read_sampler(pipe.plain_sampler)
    if (sampler := (sampler or "").strip()) or type(pipe.sampler) is type(plain.sampler):
        fast.sampler = read_sampler(sampler or pipe.fast_sampler)
    sides = [fast, plain] if pipe.comparable else [fast]
    growing = [
        side.stream([prompt], generator=torch.Generator().manual_seed(int(seed)), output_type="pil")
        for side in sides
    ]
    here: list[Any] = [None, None]
    shown_at = time.perf_counter()
    try:
        for step in itertools.zip_longest(*growing):
            here[: len(step)] = [new or old for new, old in zip(step, here, strict=False)]
            if time.perf_counter() - shown_at > _PAUSE:
                shown_at = time.perf_counter()
                yield *_pictures(here), None, _words(here, unknown)
    finally:
        for one in growing:
            one.close()
    drawn_map = _map(fast, here[0])
    yield *_pictures(here), drawn_map, _words(here, unknown)
    # Watched calls also draw what is there so far, so the clock runs over calls that nobody watches.
    for number, side in enumerate(sides):
        here[number] = side([prompt], generator=torch.Generator().manual_seed(int(seed)))
    yield *_pictures(here), drawn_map, _words(here, unknown, timed=True)


def _pictures(here: list[Any]) -> tuple[Image | None, Image | None]:
    """Return both pictures; small ones are enlarged pixel by pixel."""
    fast, plain = (None if one is None else _enlarged(one.images[0]) for one in here)
    return plain, fast


def _enlarged(picture: Image) -> Image:
    times = max(1, _SIDE // max(picture.size))
    return picture.resize((picture.width * times, picture.height * times), 0)  # 0: the nearest pixel


def _words(here: list[Any], unknown: Sequence[str], *, timed: bool = False) -> str:
    """Return what the model did not understand, how many calls each side made, and, of calls that were timed, their
    seconds and whether both drew the same picture.
    """
    lines = [f"the model does not know {', '.join(map(repr, unknown))}"] if unknown else []
    for name, output in zip(("accelerated", "plain"), here, strict=True):
        if output is not None:
            calls = int(output.trace.target_calls[0])
            done = int((output.trace.commit_call[0] >= 0).sum())
            clock = f", {output.trace.seconds:.2f} s" if timed else ""
            lines.append(f"{name}: {calls} calls, {done} tokens, {done / max(calls, 1):.2f} a call{clock}")
    if timed:
        fast, plain = here
        lines.append(f"output: {fast.trace.output_law}")
        if plain is not None:
            same = plain.tokens.shape == fast.tokens.shape and bool((plain.tokens == fast.tokens).all())
            lines.append(
                "the same picture, token for token" if same else "another picture than plain decoding"
            )
    return "\n".join(lines)


def unknown_words(pipe: VisualPipeline, prompt: str) -> list[str]:
    """The words of a prompt that the text encoder of a pipeline does not know; none where it does not say."""
    find = getattr(getattr(pipe, "text_encoder", None), "unknown_words", None)
    return find([prompt]) if find else []


def known_words(pipe: VisualPipeline) -> tuple[list[str], str]:
    """Examples of prompts for a pipeline, and a line on what it knows; both empty where that is not told."""
    labels = [str(label) for label in pipe.config.get("id2label") or ()]
    if labels:
        return labels, "**Classes**: " + ", ".join(labels)
    config = getattr(getattr(pipe, "text_encoder", None), "config", None)
    vocabulary = getattr(config, "vocabulary", None) or ()
    examples = [prompt for prompt in _PROMPTS if not unknown_words(pipe, prompt)] if vocabulary else []
    return examples, "**Words**: " + ", ".join(vocabulary) if vocabulary else ""


def fitting_samplers(pipe: VisualPipeline) -> list[str]:
    """The names of the samplers that a pipeline can decode with, its fast one first."""
    from visual_spec.pipelines.accelerate import refusals

    fitting = [name for name, reason in refusals(copy.copy(pipe)).items() if not reason]
    return list(dict.fromkeys([pipe.fast_sampler, *fitting]))


def _map(pipe: VisualPipeline, output: ImagePipelineOutput) -> Image | None:
    """Which token cost a call; None where calls draw maps, not tokens."""
    from visual_spec.eval.report.maps import acceptance_map

    grid = getattr(pipe.transformer, "grid", None)
    commit_call = output.trace.commit_call[0]
    if grid is None or commit_call.numel() != grid.num_tokens:
        return None
    return acceptance_map(commit_call, grid, _SIDE)


def make_page(models: Sequence[str], device: str | None = None, dtype: str = "float32") -> Any:
    """The page, as Gradio's `Blocks`.

    Raises:
        ImportError: Gradio is missing.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"visual-spec app needs {error.name}: pip install '.[app]' in a checkout"
        ) from error
    from visual_spec.pipelines.placing import load

    loaded = lru_cache(maxsize=2)(lambda name: load(name, device, dtype))

    def run(model: str, prompt: str, sampler: str, seed: float) -> Iterator[Shown]:
        if model not in models:  # what a client sends is not what the page offers
            raise gradio.Error(f"unknown model {model[:80]!r}")
        try:
            yield from draw(loaded, model, prompt, sampler, seed)
        except (ValueError, TypeError, FloatingPointError) as error:
            raise gradio.Error(str(error), print_exception=False) from error

    def menus(model: str) -> tuple[Any, Any, str]:
        """The prompts, the samplers and the words of a model."""
        if model not in models:
            raise gradio.Error(f"unknown model {model[:80]!r}")
        pipe = loaded(model)
        (examples, line), samplers = known_words(pipe), fitting_samplers(pipe)
        first = examples[0] if examples else ""
        return gradio.Dropdown(examples, value=first), gradio.Dropdown(samplers, value=samplers[0]), line

    with gradio.Blocks(title="visual-spec", analytics_enabled=False) as page:
        with gradio.Row():
            plain = gradio.Image(label="Plain", format="png", height=_SIDE)
            fast = gradio.Image(label="Accelerated", format="png", height=_SIDE)
        prompt = gradio.Dropdown([], label="Prompt, or class", allow_custom_value=True)
        with gradio.Row():
            model = gradio.Dropdown(list(models), value=models[0], label="Model")
            sampler = gradio.Dropdown([], label="Sampler, or name:setting=value", allow_custom_value=True)
            seed = gradio.Number(0, label="Seed", precision=0, minimum=0, maximum=2**53)
            button = gradio.Button("Draw", variant="primary")
            stop = gradio.Button("Stop")
        words = gradio.Textbox(label="Calls and seconds", lines=5)
        with gradio.Accordion("What the model knows, and which token cost a call", open=False):
            known = gradio.Markdown()
            drawn_map = gradio.Image(label="Which token cost a call", format="png")
        shown, asked = [plain, fast, drawn_map, words], [model, prompt, sampler, seed]
        drawing = button.click(run, asked, shown, api_name="draw", concurrency_limit=1)
        stop.click(None, cancels=[drawing], api_name=False)
        gradio.on([page.load, model.change], menus, [model], [prompt, sampler, known], api_name=False)
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Parse arguments and serve the page until it is interrupted."""
    parser = Parser(prog="visual-spec app", description=__doc__)
    parser.add_argument("--model", metavar="NAME", help="shown first: embedded name, folder, or Hub id")
    parser.add_argument("--port", type=at_least(1, 65535), default=7860, help="of the page")
    add(parser, *MACHINE)
    args = parser.parse_args(argv)
    from visual_spec.pipelines.embedded import embedded_models
    from visual_spec.pipelines.loading import read_facts

    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    pictures = [name for name in embedded_models() if read_facts(name).medium == "image"]
    if args.model is not None and (medium := read_facts(args.model).medium) != "image":
        raise ValueError(f"--model {args.model} makes {medium}; the page shows pictures.")
    first = args.model or "things"
    page = make_page([first, *(name for name in pictures if name != first)], args.device, args.dtype)
    import gradio  # pyright: ignore[reportMissingImports]

    # Fonts of the system: others would be fetched from the network.
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    page.launch(server_name="127.0.0.1", server_port=args.port, share=False, quiet=is_quiet(), theme=theme)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
