"""Reinforcement learning of a model of pictures (GRPO): `things` learns to draw in the middle, its parser as reward.

    python examples/grpo.py --output_dir grpo           # goes on where it was stopped
    python examples/grpo.py --output_dir grpo --time    # what drawing costs, plainly and by windows: five minutes

A step draws groups of pictures, lets the parser of the data say which attributes of its prompt each picture has and
whether what it shows stands in the middle, and makes the tokens of those above the mean of their group more likely
(Shao et al. 2024, arXiv 2402.03300, section 4.1). There is no critic. The ratios start from the log-probabilities that
the sampler itself returns (`output_logprobs`), so no pass over the pictures is spent on them. A window draws the tokens
of plain decoding, so it changes the time alone. Names are those of TRL's `GRPOConfig` where it has them.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import HfArgumentParser

from visual_spec import ImagePipeline
from visual_spec.data import things, things_parser
from visual_spec.data.shapes import CELL
from visual_spec.eval.intervals import rate
from visual_spec.eval.machine import environment
from visual_spec.files.documents import write_json
from visual_spec.files.whole import whole_file
from visual_spec.pipelines.texts import as_condition


@dataclass(frozen=True)
class Config:
    """Settings of a run."""

    output_dir: str  # of checkpoint.pt, grpo.json, times.json and the trained pipeline
    max_steps: int = 20
    generation_batch_size: int = 128  # pictures a step
    num_generations: int = 16  # pictures of one prompt: a group
    drawn_together: int = 16  # pictures a call of the pipeline; in more than 32 a processor decodes plainly
    per_device_train_batch_size: int = 64  # pictures an update
    num_iterations: int = 1  # updates for each picture
    learning_rate: float = 5e-5
    trainable: str = "attention"  # parameters with this in their names; empty: all
    temperature: float = 0.5  # at 1, ten times the noise in the gradient (docs/LOG.md)
    epsilon: float = 0.2  # how far a ratio counts
    beta: float = 0.0  # weight of the divergence from the model before training
    seed: int = 0
    eval_prompts: int = 400  # held-out ones, before and after
    time: bool = False  # time both ways of drawing, and train no further
    time_steps: int = 2


def score(prompt: str, picture: np.ndarray) -> dict[str, bool]:
    """The attributes of the parser, and whether the things' centre is that of the picture, to half a token.

    The captions say no places, and the data has all: one thing is in the middle in a ninth of its pictures, a pair in a
    quarter. So this is a wish that the model does not know.
    """
    places = [(thing.x, thing.y) for thing in things_parser.parse_picture(picture).things]
    across, down = np.abs(np.mean(places, 0) - picture.shape[0] / 2) <= CELL / 2 if places else [False] * 2
    return {**things_parser.score(prompt, picture), "across": bool(across), "down": bool(down)}


@dataclass
class Rollout:
    """Pictures of a step, N = groups x `num_generations`, one group after the other."""

    prompts: list[str]
    tokens: Tensor  # long [N, L]
    logprobs: Tensor  # float [N, L], of each token when it was drawn
    hits: list[dict[str, bool]]  # which attributes each picture has
    calls: float  # mean target calls of a picture
    nats: float  # mean surprise of a picture: how much is left to chance

    @property
    def rewards(self) -> Tensor:
        """Half the share of the attributes that are right, and a half if all are: float [N]."""
        return torch.tensor([(np.mean([*hits.values()]) + all(hits.values())) / 2 for hits in self.hits])

    def answers(self) -> dict[str, list[bool]]:
        """By attribute: whether each picture has it, of those that were asked for it; "whole": all attributes."""
        names = dict.fromkeys(name for hits in self.hits for name in hits)
        each = {name: [hits[name] for hits in self.hits if name in hits] for name in names}
        return {"whole": [all(hits.values()) for hits in self.hits], **each}


def draw(pipe: Any, prompts: list[str], first_seed: int, config: Config, score: Callable) -> Rollout:
    """Draw one picture for each prompt, without guidance; picture i has the seed `first_seed + i`."""
    outputs, law = [], dict(guidance_scale=1.0, temperature=config.temperature, top_k=0, top_p=1.0)
    for start in range(0, len(prompts), config.drawn_together):
        some = prompts[start : start + config.drawn_together]
        seeds = [torch.Generator().manual_seed(first_seed + start + place) for place in range(len(some))]
        outputs.append(pipe(some, generator=seeds, output_type="np", output_logprobs=True, **law))
    tokens = torch.cat([output.tokens for output in outputs])
    logprobs = torch.cat([output.trace.logprobs for output in outputs]).to(tokens.device)
    pictures = np.rint(255 * np.concatenate([output.images for output in outputs])).astype(np.uint8)
    calls = torch.cat([output.trace.target_calls for output in outputs]).float().mean().item()
    hits = [score(*pair) for pair in zip(prompts, pictures, strict=True)]
    return Rollout(prompts, tokens, logprobs, hits, calls, -logprobs.sum(1).mean().item())


def advantages_of(rewards: Tensor, num_generations: int) -> Tensor:
    """Rewards [N] less the mean of their group, over its standard deviation."""
    groups = rewards.view(-1, num_generations)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(
    logprobs: Tensor, drawn: Tensor, advantages: Tensor, config: Config, reference: Tensor | None = None
) -> Tensor:
    """The clipped objective, negated, its mean over pictures and tokens.

    `logprobs` and `drawn` [N, L] are under the policy as it is, and as it was when it drew; `reference` [N, L] under
    the model before training: then `beta` times Schulman's estimate of the divergence (k3) is added.
    """
    ratio, gain = (logprobs - drawn).exp(), advantages[:, None]
    clipped = ratio.clamp(1 - config.epsilon, 1 + config.epsilon)
    loss = -torch.minimum(ratio * gain, clipped * gain).mean()
    if reference is None:
        return loss
    return loss + config.beta * ((reference - logprobs).exp() - (reference - logprobs) - 1).mean()


class Trainer:
    """A policy, its optimiser, and the pipeline that draws with the policy's weights.

    `prompts_of(count, seed)` gives prompts to train on; `score(prompt, picture)` says which attributes are right, as
    {name: bool}, of a picture uint8 [H, W, 3].
    """

    def __init__(self, pipe: Any, config: Config, prompts_of: Callable, score: Callable) -> None:
        self.pipe, self.config, self.prompts_of, self.score = pipe, config, prompts_of, score
        self.policy = copy.deepcopy(pipe.transformer).requires_grad_(False)
        self.reference = copy.deepcopy(self.policy) if config.beta else None
        named = self.policy.named_parameters()
        trained = [part.requires_grad_(True) for name, part in named if config.trainable in name]
        self.optimiser = torch.optim.AdamW(trained, config.learning_rate, weight_decay=0.0)
        self.curve: list[dict[str, float]] = []
        self.checkpoint = Path(config.output_dir) / "checkpoint.pt"
        free = ("output_dir", "max_steps", "eval_prompts", "time", "time_steps")
        self.settings = {name: value for name, value in asdict(config).items() if name not in free}

    def rollout(self, step: int) -> Rollout:
        """Draw the pictures of a step. They depend on the step, the seed and the weights alone."""
        size, group = self.config.generation_batch_size, self.config.num_generations
        step += self.config.seed * 10**6
        prompts = [prompt for prompt in self.prompts_of(size // group, step) for _ in range(group)]
        return draw(self.pipe, prompts, step * size, self.config, self.score)

    def log_probabilities(self, model: Any, rollout: Rollout, rows: Tensor) -> Tensor:
        """Of every token of some pictures under a model, [rows, L], by one teacher-forced pass."""
        condition = as_condition(*self.pipe.encode_prompt([rollout.prompts[row] for row in rows]))
        logits = model.teacher_forced(rollout.tokens[rows], condition) / self.config.temperature
        return -F.cross_entropy(logits.mT, rollout.tokens[rows], reduction="none")

    def learn(self, rollout: Rollout, step: int) -> dict[str, float]:
        """Update the policy `num_iterations` times on each picture, but for groups of one reward, which teach nothing.

        Raises:
            RuntimeError: before the first update, the policy gives other log-probabilities than the sampler did.
        """
        config, facts = self.config, []
        advantages = advantages_of(rollout.rewards, config.num_generations).to(rollout.logprobs)
        shuffled = torch.randperm(len(advantages), generator=torch.Generator().manual_seed(step))
        useful = shuffled[(advantages[shuffled] != 0).cpu() | bool(config.beta)]
        for rows in useful.split(config.per_device_train_batch_size) * config.num_iterations:
            logprobs, drawn = self.log_probabilities(self.policy, rollout, rows), rollout.logprobs[rows]
            moved = (logprobs - drawn).detach()
            if not facts and not moved.abs().max() < 1e-3:
                raise RuntimeError(f"step {step}: {moved.abs().max()} nats away from the sampler's law")
            with torch.no_grad():
                reference = self.reference and self.log_probabilities(self.reference, rollout, rows)
            loss = grpo_loss(logprobs, drawn, advantages[rows], config, reference)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimiser.step()
            clipped = ((moved.exp() - 1).abs() > config.epsilon).float().mean()
            facts.append([loss.item(), clipped.item()])
        self.pipe.update_weights(self.policy.state_dict())
        loss, clipped = np.mean(facts or [[0.0] * 2], 0).tolist()
        return {"loss": loss, "clipped": clipped, "taught": len(useful)}

    def steps(self) -> Iterator[int]:
        """Go through the steps that are left: draw, score, learn, and save."""
        for step in range(len(self.curve), self.config.max_steps):
            start = time.process_time()
            rollout = self.rollout(step)
            drawn = time.process_time()
            learned = self.learn(rollout, step)
            seconds = {"drawing": drawn - start, "training": time.process_time() - drawn}
            shares = {name: np.mean(hits).item() for name, hits in rollout.answers().items()}
            facts = {"reward": rollout.rewards.mean().item(), **shares, "nats": rollout.nats}
            self.curve.append({**facts, "calls": rollout.calls, **learned, **seconds})
            parts = {"policy": self.policy.state_dict(), "optimiser": self.optimiser.state_dict()}
            with whole_file(self.checkpoint) as path, path.open("wb") as file:
                torch.save({"settings": self.settings, "curve": self.curve, **parts}, file)
            yield step

    def resume(self) -> None:
        """Go on where a run was stopped, if there was one; ValueError if it had other settings."""
        if not self.checkpoint.exists():
            return
        saved = torch.load(self.checkpoint, weights_only=True)
        if saved["settings"] != self.settings:
            raise ValueError(f"{self.checkpoint}: a run of other settings; pass another --output_dir")
        self.policy.load_state_dict(saved["policy"])
        self.pipe.update_weights(saved["policy"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.curve = saved["curve"]


def accuracy(pipe: Any, config: Config) -> dict[str, Any]:
    """What a pipeline gets right of held-out prompts, with 95 % intervals, and the nats of a picture."""
    rollout = draw(pipe, things.held_out_prompts(config.eval_prompts, 1), 10**9, config, score)
    places = ("across", "down")
    prompt = [all(hit for name, hit in hits.items() if name not in places) for hits in rollout.hits]
    answers = {**rollout.answers(), "prompt": prompt}  # what the caption says
    return {name: rate(hits) for name, hits in answers.items()} | {
        "nats": rollout.nats,
        "calls": rollout.calls,
    }


def both_ways(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """Draw the next steps plainly and by the pipeline's own sampler; seconds are of the wall and of the processor.

    The default draws `drawn_together` pictures a call; plain decoding as many, and a whole half step: "plain, 64".
    """
    few, many = trainer.config.drawn_together, trainer.config.generation_batch_size // 2
    ways = {"plain": (trainer.pipe.plain, few), f"plain, {many}": (trainer.pipe.plain, many)}
    ways["default"] = trainer.pipe.sampler, few
    clock = lambda: np.array([time.perf_counter(), time.process_time()])  # noqa: E731
    for step in range(len(trainer.curve), len(trainer.curve) + trainer.config.time_steps):
        drawn, seconds = {}, {}
        for way in [*ways][:: 1 if step % 2 else -1]:
            (trainer.pipe.sampler, together), start = ways[way], clock()
            trainer.config = replace(trainer.config, drawn_together=together)
            drawn[way] = trainer.rollout(step)
            seconds[way] = (clock() - start).tolist()
        one, other, start = drawn["plain"], drawn["default"], clock()
        trainer.learn(other, step)
        seconds["training"] = (clock() - start).tolist()
        apart = (one.logprobs - other.logprobs).abs().max().item()
        equal = {"equal_tokens": torch.equal(one.tokens, other.tokens), "logprobs_apart": apart}
        yield {"step": step, "seconds": seconds, **equal, "calls": {way: drawn[way].calls for way in ways}}


def main() -> None:
    (config,) = HfArgumentParser(Config).parse_args_into_dataclasses()  # pyright: ignore[reportArgumentType]
    out, pipe = Path(config.output_dir), ImagePipeline.from_pretrained("things")
    pipe.set_progress_bar_config(disable=True)
    trainer = Trainer(pipe, config, things.training_prompts, score)
    facts = {"environment": environment(pipe.device, pipe.dtype), "settings": trainer.settings}
    before = out / "before.json"
    if not config.time and not before.exists():
        write_json(before, accuracy(pipe, config))
    trainer.resume()
    if config.time:
        write_json(out / "times.json", {**facts, "steps": [*both_ways(trainer)]}, indent=1)
        return
    for step in trainer.steps():
        print(step, {name: round(value, 4) for name, value in trainer.curve[-1].items()}, flush=True)
    pipe.save_pretrained(out / "trained")
    ends = {"before": json.loads(before.read_text()), "after": accuracy(pipe, config)}
    write_json(out / "grpo.json", {**facts, **ends, "curve": trainer.curve})


if __name__ == "__main__":
    main()
