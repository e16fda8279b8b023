"""Train a `BlockDrafter` for a trained target, on states of its own decodes with the drafter as it is.

A round draws samples with the drafter, at the law with which the user decodes, and notes what the drafter was shown
before every call. The labels are the target's laws at these slots, which the end of the decode shows: after the tokens
that were kept in the end. So states are of the drafter's own making (on-policy), and no label needs a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from visual_spec.models.core.protocol import DecodeState, NextTokenModel
from visual_spec.models.core.settings import Count, read_fields
from visual_spec.prototype.block_drafts.drafter import BlockDrafter, BlockDrafterState
from visual_spec.prototype.block_drafts.sampler import BlockDraftSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.jacobi_identical import USUAL
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    run_trainer,
)

if TYPE_CHECKING:
    from visual_spec.models.next_token.llamagen import TextCondition
    from visual_spec.pipelines.base import VisualPipeline

# Draws the samples of a round with a sampler and a drafter: what `accelerate` or a pipeline does with them.
Draw = Callable[[int, BlockDraftSampler, "Recorder"], object]
# A drafter, how to draw, the temperature of the law, and figures for the record.
Plan = tuple[BlockDrafter, Draw, float, Callable[[], Mapping[str, object]]]


@dataclass(frozen=True)
class BlockTraining:
    """Settings of a run: `steps` in all, the samples drawn anew after each `steps_a_round` of them.

    Attributes:
        samples: of a round, which `draw` makes.
        batch_size, calls: samples of a step, and states of each.
        decay: weight of a slot beside that of the slot before it.
        layers, block_size, corrects: of the drafter, see `BlockDrafter.for_target`.
    """

    steps: Count = 1200
    steps_a_round: Count = 60
    samples: Count = 32
    batch_size: Count = 8
    calls: Count = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    decay: float = 0.93
    seed: int = 0
    layers: Count = 1
    block_size: Count = 16
    corrects: bool = True

    def __post_init__(self) -> None:
        read_fields(self)


class _Watched(BlockDrafterState):
    """A state whose samples all stay to the end, so that notes of all have one length."""

    select = DecodeState.select


class Recorder:
    """A drafter that notes what it is shown. `drafter` None: it drafts nothing new, as before the first round.

    Attributes:
        shown: of each call the tokens [B, 1 + N], what was fed [B, N], slots [B, 1 + N], and old states [B, N, F].
        reads, features: by slot, what the drafter and the head read last there, [R, S, ...].
    """

    def __init__(self, drafter: BlockDrafter, drafts: bool) -> None:
        self.drafter, self.drafts = drafter, drafts
        self.most, self.taps = drafter.most, drafter.taps
        self.grid = None
        self.vocab_size = 0

    def to(self, *args: object, **kwargs: object) -> Recorder:
        return self

    def follow(self, model: NextTokenModel, state: Any, **settings: Any) -> BlockDrafterState:
        made = self.drafter.follow(model, state, **settings)
        self.state, self.shown = _Watched(**vars(made)), []
        self.prompt_reads: Tensor | None = getattr(getattr(state, "inner", state), "tapped", None)
        slots, own = made.target.grid.num_tokens + made.window, getattr(state, "inner", state)
        width = self.drafter.fc.in_features
        rows = len(made.start)
        self.reads = own.features.new_zeros(rows, slots, width)
        self.features = own.features.new_zeros(len(own.features), slots, own.features.shape[-1])
        return self.state

    def observe(self, state: BlockDrafterState, target: Any, slots: Tensor) -> None:
        self.drafter.observe(state, target, slots)
        own = getattr(target, "inner", target)
        read = own.features if not self.taps or getattr(own, "tapped", None) is None else own.tapped
        if state.stale is not None:
            read = torch.cat(read.chunk(1 + own.guided), -1)
        for buffer, values in ((self.reads, read), (self.features, own.features)):
            at = slots.repeat(len(values) // len(slots), 1)[..., None].expand_as(values)
            buffer.scatter_(1, at, values)

    def draft(
        self,
        state: BlockDrafterState,
        tokens: Tensor,
        fed: Tensor,
        slots: Tensor,
        draw: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        at = slots[:, :-1, None]
        old = (
            None
            if state.stale is None
            else state.stale.gather(1, at.expand(-1, -1, state.stale.shape[-1])).half()
        )
        self.shown.append((tokens.clone(), fed.clone(), slots.clone(), old))
        return self.drafter.draft(state, tokens, fed, slots, draw) if self.drafts else tokens[:, 1:]


class _Held:
    """Keys and values [R, H, S, D] of each layer, in place of a cache."""

    def __init__(self, layers: list[tuple[Tensor, ...]]) -> None:
        self.layers, self.num_slots = layers, layers[0][0].shape[2]

    def layer(self, index: int) -> tuple[Tensor, ...]:
        return self.layers[index]


def block_loss(notes: Recorder, chosen: Tensor, calls: Tensor, temperature: float, decay: float) -> Tensor:
    """Return the cross entropy [] of the drafter's laws to the target's, over blocks of noted states.

    Args:
        chosen: long [P], samples of the round.
        calls: long [P, C], calls of each.
    """
    drafter, state = notes.drafter, notes.state
    count, samples = calls.shape[1], len(notes.shown[0][0])
    branches = len(notes.reads) // samples
    rows = (chosen + samples * torch.arange(branches)[:, None]).flatten()  # of the drafter's state
    reads, length = notes.reads[rows], state.prompt.shape[1]
    slots = torch.arange(reads.shape[1])
    positions = state.start[rows, None] + slots
    if length and notes.prompt_reads is not None:
        reads = torch.cat([notes.prompt_reads[rows], reads], 1)
        positions = torch.cat([(state.prompt[rows].cumsum(1) - 1).clamp(min=0), positions], 1)
    each = torch.arange(len(rows)).view(branches, -1, 1).expand(-1, -1, count).flatten()
    held = [
        tuple(part.transpose(1, 2)[each] for part in pair) for pair in drafter.keys(state, reads, positions)
    ]
    parts: dict[str, Any] = vars(state) | dict(
        cache=_Held(held), prompt=state.prompt[rows][each], start=state.start[rows][each], stale=None
    )
    pairs = list(zip(chosen.repeat_interleave(count).tolist(), calls.flatten().tolist(), strict=True))
    shown: Any = [
        [part if part is None else part[sample] for part in notes.shown[call]] for sample, call in pairs
    ]
    tokens, fed, at = (torch.stack([part[index] for part in shown]) for index in range(3))
    old = None if shown[0][3] is None else torch.stack([part[3] for part in shown]).to(reads.dtype)
    here = BlockDrafterState(**parts)
    logits = drafter.logits(here, drafter.hidden(here, tokens, fed, at[:, :-1], old))
    with torch.no_grad():
        wanted = []
        for branch in range(len(notes.features) // samples):
            of = notes.features[branch * samples + chosen].repeat_interleave(count, 0)
            wanted.append(of.gather(1, at[:, :-1, None].expand(-1, -1, of.shape[-1])))
        score = getattr(state.target, "score", None) or state.target.output
        law = (_mixed([score(part).float() for part in wanted], state.guidance) / temperature).softmax(-1)
    drafted = _mixed(list(logits.chunk(2)) if here.guided else [logits], state.guidance)
    cross = -(law * (drafted / temperature).log_softmax(-1).clamp(min=-1e4)).sum(-1)
    weight = (at[:, 1:] < state.target.grid.num_tokens) * decay ** torch.arange(at.shape[1] - 1)
    return (cross * weight).sum() / weight.sum()


def _mixed(branches: list[Tensor], guidance: float) -> Tensor:
    if len(branches) == 1:
        return branches[0]
    return branches[1] + guidance * (branches[0] - branches[1])


def train_block_drafter(
    drafter: BlockDrafter,
    draw: Draw,
    temperature: float,
    settings: BlockTraining,
    out: Path,
    judge: Callable[[], Mapping[str, object]] = dict,
) -> dict[str, Any]:
    """Train a drafter in place, save it in `out/drafter`, return the record (also `out/drafter/training.json`).

    An interrupted run resumes from the round it was in: from `out/resume.pt`, which the finished run removes.

    Args:
        draw: (round, sampler, drafter): draws `settings.samples` samples of the target, others each round.
        temperature: of the law at which it draws.
        judge: figures for the record, when it is trained.
    """
    torch.manual_seed(settings.seed)
    optimisers = muon_and_adamw(
        drafter.layers, drafter.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate, warmup=min(50, settings.steps // 4))
    # A round of many samples opens the window that one sample has.
    sampler, noted = BlockDraftSampler(USUAL, drafted=drafter.most, graph=False), {}

    def batch(step: int) -> tuple[Tensor, Tensor]:
        turn = step // settings.steps_a_round
        if turn not in noted:
            notes = Recorder(drafter, drafts=turn > 0)
            drafter.eval()
            draw(turn, sampler, notes)
            drafter.train()
            noted.clear()
            noted[turn] = notes
        rng, notes = np.random.default_rng((settings.seed, step)), noted[turn]
        samples = rng.choice(len(notes.shown[0][0]), settings.batch_size)
        calls = rng.integers(len(notes.shown), size=(settings.batch_size, settings.calls))
        return torch.from_numpy(samples), torch.from_numpy(calls)

    def loss(samples: Tensor, calls: Tensor) -> Tensor:
        (notes,) = noted.values()
        return block_loss(notes, samples, calls, temperature, settings.decay)

    run = Trainer(drafter, settings, out, descend, every=settings.steps_a_round, parts={"drafter": drafter})
    folder = out / "drafter"
    return run.run(loss, batch, judge, lambda: drafter.save_pretrained(folder), folder=folder)


HELP = """Train a drafter of blocks for a model.

`python -m visual_spec.training.block_drafter --model things --out FOLDER`
`... --model FOLDER --codes 1000 5096 --end 2 --prompts prompts.txt --temperature 0.8 --out FOLDER`

The model draws the samples that the drafter learns from, with the drafter. Afterwards `--out/drafter` is a folder of
`speculators`; with `--corrects False` one that vLLM reads. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class BlockOptions(RunOptions):
    model: str = option(
        "embedded model, a folder with a pipeline, or one of transformers with --codes", "things"
    )
    codes: list[int] = field(
        default_factory=list, metadata={"help": "first id of the codes, and the last + 1"}
    )
    end: int | None = option("id that ends a text", None)
    prompts: str = option("file of prompts, one a line; of pictures the model's own captions", "")
    temperature: float | None = option("of the law; default: the pipeline's own, or 1", None)
    new_tokens: int = option("most tokens of a text", 256)


def main() -> None:
    options, settings = read_options(HELP, BlockOptions, BlockTraining)
    torch.manual_seed(settings.seed)
    drafter, draw, temperature, judge = (of_language if options.codes else of_pictures)(options, settings)
    record = train_block_drafter(drafter, draw, temperature, settings, options.out, judge)
    print({key: record[key] for key in record if key not in ("settings", "loss")})


def generators(first: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + index) for index in range(count)]


def of_pictures(options: BlockOptions, settings: BlockTraining) -> Plan:
    """A drafter for the model of a pipeline of captions, how to draw, the temperature, and figures at the end."""
    from visual_spec.data.captions import captions_of
    from visual_spec.pipelines.loading import load_pipeline
    from visual_spec.samplers.core.law import TokenLaw

    pipe = load_pipeline(options.model).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    given = dict(options_of_law(pipe))
    if options.temperature is not None:
        given["temperature"] = options.temperature
    law, model = TokenLaw(**given), pipe.transformer
    listed = Path(options.prompts).read_text().splitlines() if options.prompts else []

    def condition(seed: tuple[int, int], count: int) -> TextCondition:
        rng = np.random.default_rng(seed)
        own = [listed[index] for index in rng.integers(len(listed), size=count)] if listed else None
        return pipe.make_condition(own or captions_of(pipe).training_prompts(count, seed))

    def draw(turn: int, sampler: BlockDraftSampler, drafter: Recorder) -> None:
        count = settings.samples
        print(f"round {turn}: {count} samples", flush=True)
        asked = condition((settings.seed, turn), count)
        keys = generators((settings.seed * 1000 + turn) * 10_000, count)
        sampler(model, asked, law=law, generator=keys, batch_size=count, drafter=drafter)

    state = model.prefill(condition((0, 0), 1), batch_size=1, guided=law.guided, window=1)
    drafter: Any = fresh(model, state, settings)
    drafter.to(options.device)
    asked = condition((settings.seed, 10**6), 8)

    def judge() -> dict[str, object]:
        rates = {}
        for name, sampler, parts in (
            ("default", SpeculativeJacobiSampler(), {}),
            ("drafter", BlockDraftSampler(drafted=drafter.most), {"drafter": drafter}),
        ):
            window = sampler.from_config(sampler.config, window=32)
            found = window(model, asked, law=law, generator=generators(0, 8), batch_size=8, **parts)
            rates[name] = round(float(found.trace.tokens_per_call.mean()), 3)
        return {"tokens_per_call": rates}

    return drafter, draw, law.temperature, judge


def options_of_law(pipe: VisualPipeline) -> dict[str, Any]:
    """The law of a pipeline's defaults, but for filters of tokens, which drafts need not know."""
    return {name: pipe.config[f"default_{name}"] for name in ("guidance_scale", "temperature")}


def of_language(options: BlockOptions, settings: BlockTraining) -> Plan:
    """The same for a language model of codes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
    from visual_spec.models.next_token.code_language import CodeLanguageModel
    from visual_spec.pipelines.accelerate.codes import generate_codes

    if len(options.codes) != 2 or not options.prompts:
        raise ValueError(
            f"codes={options.codes}, prompts={options.prompts!r}; pass --codes FIRST STOP and --prompts FILE."
        )
    model: Any = AutoModelForCausalLM.from_pretrained(options.model)
    model.to(options.device).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    listed = [line for line in Path(options.prompts).read_text().splitlines() if line.strip()]
    temperature = 1.0 if options.temperature is None else options.temperature
    codes = (options.codes[0], options.codes[1])

    def draw(turn: int, sampler: BlockDraftSampler, drafter: Recorder) -> None:
        print(f"round {turn}: {settings.samples} samples", flush=True)
        rng = np.random.default_rng((settings.seed, turn))
        texts = [listed[index] for index in rng.integers(len(listed), size=settings.samples)]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(options.device)
        keys = generators((settings.seed * 1000 + turn) * 10_000, settings.samples)
        generate_codes(
            model, inputs["input_ids"], inputs["attention_mask"], codes=codes, end=options.end, sampler=sampler,
            drafter=drafter, generator=keys, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            max_new_tokens=options.new_tokens,
        )  # fmt: skip

    stage = CodeLanguageModel(model, codes, options.end, new_tokens=options.new_tokens)
    ids = tokenizer(listed[:1], return_tensors="pt")["input_ids"].to(options.device)
    prompt = ImagePrompt(Prompt(ids, torch.ones_like(ids, dtype=torch.bool)))
    state = stage.prefill(prompt, batch_size=1, guided=False, window=1)
    drafter: Any = fresh(stage, state, settings)
    return drafter.to(options.device, model.dtype), draw, temperature, dict


def fresh(target: NextTokenModel, state: DecodeState, settings: BlockTraining) -> BlockDrafter:
    """A drafter of the settings for a target; its state is of a prefill."""
    return BlockDrafter.for_target(
        target, state, layers=settings.layers, corrects=settings.corrects, block_size=settings.block_size
    )


if __name__ == "__main__":
    run_trainer(main)
