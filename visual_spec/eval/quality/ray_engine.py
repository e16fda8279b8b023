"""Draw a set of samples by Ray Data, on one machine or on the machines of a Ray cluster.

Every batch of the set is one row. `map_batches` hands the rows to one actor a GPU, or a processor core, each of which
holds the pipeline. An actor draws as `visual_spec.eval.quality.sample_set` does and writes the same files, so the
folder has to lie where all machines can write. When an actor or a machine is lost, Ray starts another one and gives it
the same rows again. Batches that are on disk are not drawn twice.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from visual_spec.eval.media import show
from visual_spec.eval.quality.sample_set import Report, SampleSet, held
from visual_spec.files.extras import extra


def require_ray() -> ModuleType:
    """The module `ray`; ImportError where Ray Data is missing (extra `scale`)."""
    with extra("scale", "--engine ray needs Ray Data"):
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    return ray


class _Drawer:
    """An actor: the pipeline, and a batch of samples a row.

    Bad input and full disks are reported in the rows: Ray would wrap what is raised, and start a refused actor again.
    """

    def __init__(self, make: Callable[[], SampleSet]) -> None:
        self.refused = ""
        try:
            self.work = make()
            self.work.open()
        except (ValueError, OSError, ImportError) as error:
            self.refused = str(error)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, object]:
        for first in rows["first"].tolist():
            try:
                if not self.refused and self.work.done(first) is None:
                    self.work.draw(first)
            except (ValueError, OSError) as error:
                self.refused = str(error)
        return {"first": rows["first"], "refused": [self.refused] * len(rows["first"])}


def sample_with_ray(
    make: Callable[[], SampleSet],
    outline: SampleSet,
    *,
    workers: int | None = None,
    report: Report = lambda text: None,
) -> dict[str, object] | None:
    """Draw a set on a Ray cluster, or go on where a run stopped.

    The cluster is the one that `RAY_ADDRESS` names; without one, Ray starts on this machine.

    Args:
        make: the set with its pipeline, called once by every actor.
        outline: the same set for this process, which draws nothing: `pipe` may be the facts of the pipeline.
        workers: actors; None: as many as the cluster has GPUs, or processor cores where it has none.

    Returns:
        As `sample_set.sample`.

    Raises:
        ImportError: see `require_ray`.
        ValueError: as `sample_set.sample`, also where an actor meets an OSError; fewer than 1 worker.
        OSError: another process is at work.
    """
    ray = require_ray()
    if outline.num < 1 or outline.batch_size < 1:
        raise ValueError(f"num={outline.num}, batch_size={outline.batch_size}; pass at least 1 of each")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers}; pass at least 1")
    outline.folder.mkdir(parents=True, exist_ok=True)
    with held(outline.folder / ".lock-0"):
        started_here = not ray.is_initialized()
        if started_here:
            ray.init(logging_level="warning", log_to_driver=False)
        try:
            _draw_missing(ray, make, outline, workers, report)
        finally:
            if started_here:
                ray.shutdown()
    return outline.finish()


def _draw_missing(
    ray: ModuleType, make: Callable[[], SampleSet], outline: SampleSet, workers: int | None, report: Report
) -> None:
    missing = [first for first in outline.batches if outline.done(first) is None]
    if not missing:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0))
    count = min(workers or gpus or int(resources["CPU"]), len(missing))
    report(f"{len(missing)} batches on {count} {'GPUs' if gpus else 'processor cores'}")
    rows = ray.data.from_items([{"first": first} for first in missing], override_num_blocks=len(missing))
    drawn = rows.map_batches(
        _Drawer,
        fn_constructor_args=(make,),
        batch_size=1,
        concurrency=count,
        **({"num_gpus": 1} if gpus else {"num_cpus": 1}),
    )
    for number, row in enumerate(drawn.iter_rows(), 1):
        if row["refused"]:
            raise ValueError(row["refused"])
        report(f"batch {number} of {len(missing)}")


class Rollouts:
    """What `map_batches` of Ray Data draws rollouts by: rows of prompts and seeds get tokens and log-probabilities.

        rows = ray.data.from_items([{"prompt": "a fox on a sky background", "seed": seed} for seed in range(64)])
        drawn = rows.map_batches(Rollouts, fn_constructor_args=("things",), batch_size=16, concurrency=2)
        drawn.write_parquet("rollouts")

    Args:
        model: name of an embedded model, folder or Hub id; every actor loads it once.
        sampler: of the model's law, as on the command line; None: the pipeline's own.
        pictures: rows get their picture, too, for a reward that looks at it.
        law: arguments of the pipeline's call, such as guidance_scale.
    """

    def __init__(self, model: str, sampler: str | None = None, *, pictures: bool = False, **law: Any) -> None:
        from visual_spec.pipelines.placing import load
        from visual_spec.pipelines.sampler_text import make_sampler, parse_sampler

        self.pipe: Any = load(model, None, None)
        self.pictures, self.law = pictures, law
        if sampler is not None:
            name, settings = parse_sampler(sampler)
            self.pipe.sampler = make_sampler(name, **settings)
        self.pipe.check_logprobs(True)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the columns tokens int32 [N, L], logprobs and model_logprobs float32 [N, L]; and image uint8
        [N, H, W, 3] with `pictures`. A row depends on its prompt, its seed and the weights alone."""
        seeds = [torch.Generator().manual_seed(int(seed)) for seed in rows["seed"]]
        asked = dict(generator=seeds, output_type="latent", output_logprobs=True)
        output = self.pipe([str(prompt) for prompt in rows["prompt"]], **asked, **self.law)
        drawn = {"tokens": output.tokens.cpu().numpy().astype(np.int32)}
        for name in ("logprobs", "model_logprobs"):
            if name != "logprobs" or output.trace.logprobs_law == "drawn":
                drawn[name] = getattr(output.trace, name).cpu().numpy()
        if self.pictures:
            drawn["image"] = show(self.pipe, drawn["tokens"])
        return {**rows, **drawn}
