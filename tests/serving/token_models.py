"""Run by `test_token_models.py` in a process of its own: tiny random models of transformers, served and accelerated.

python -m tests.serving.token_models FOLDER NAME GUIDED WINDOW RUNNER [IMPLEMENTATION]
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    folder, name, guided, window, runner = (
        Path(sys.argv[1]),
        sys.argv[2],
        *map(int, sys.argv[3:5]),
        sys.argv[5],
    )
    if runner == "second":
        from tests.serving import interpreted  # noqa: F401  # before vLLM
    import torch
    from vllm import LLM

    import visual_spec
    from tests.models.next_token import tiny_transformers as tiny
    from visual_spec.samplers.core.law import TokenLaw
    from visual_spec.serving.vllm.engine import draw_tokens, engine_arguments
    from visual_spec.serving.vllm.start import windows_of
    from visual_spec.serving.vllm.token_models import ModelPrompts, save_model_for_vllm

    # vLLM has no attention for heads of fewer channels than 32.
    model = getattr(tiny, name)(torch.float32, hidden_size=128)
    grids: Any = {"janus": None, "emu3": [(5, 6)], "glm_image": [(2, 3), (4, 6)]}[name]
    asked: dict[str, Any] = {
        "janus": dict(low=6, high=48, pad=0, last=3, first=1),
        "emu3": dict(low=50, high=62, pad=1, last=62, first=0),
        "glm_image": dict(low=30, high=50, pad=50, last=26, first=31),
    }[name]
    rows: list[dict[str, Any]] = [tiny.one(tiny.prompts([6, 4, 7], **asked), row) for row in range(3)]
    if name == "emu3":
        rows = [row | dict(image_sizes=[[5, 6]]) for row in rows]
    if name == "glm_image":
        rows = [row | dict(image_grid_thw=torch.tensor([[1, 4, 6], [1, 2, 3]])) for row in rows]

    save_model_for_vllm(model, folder, grids=grids, prompt_tokens=8)
    more = {"model_impl": "transformers"} if sys.argv[6:] == ["transformers"] else {}
    engine = LLM(
        **engine_arguments(
            folder, window=window, requests=6, second=runner == "second", dtype="float32", **more
        )
    )
    windows = windows_of(engine.llm_engine.vllm_config)
    assert windows is not None
    windows.calls = 0
    law = TokenLaw(temperature=0.5, top_k=4, guidance_scale=1.5 if guided else 1.0)
    places = len(windows.served.places)
    served = draw_tokens(engine, ModelPrompts(model, guided=bool(guided)), rows, range(3), law, places)
    calls = windows.calls

    visual_spec.accelerate(model, "speculative-jacobi:window=8")
    settings: dict[str, Any] = dict(do_sample=True, temperature=0.5, top_k=4)
    if name != "glm_image":
        settings["guidance_scale"] = law.guidance_scale
    expected, most = [], 0
    for seed, row in enumerate(rows):
        ids = model.generate_images(**row, **settings, generator=torch.Generator().manual_seed(seed))
        start = 0 if name == "janus" else row["input_ids"].shape[1]
        expected.append(ids[0, start : start + places] + (windows.served.first if name == "janus" else 0))
        most = max(most, int(model.last_trace.target_calls.max()))
    equal = [own.tolist() == other.tolist() for own, other in zip(served, expected, strict=True)]
    if name == "glm_image":  # and by the third door, that of SGLang
        from visual_spec.serving.sglang.route import PriorTokens

        asked_of = [
            {
                "input_ids": row["input_ids"][0][row["attention_mask"][0] > 0].tolist(),
                "image_data": [{"image_grid_thw": row["image_grid_thw"].tolist()}],
                "sampling_params": {"temperature": 0.5, "top_k": 4, "sampling_seed": seed},
            }
            for seed, row in enumerate(rows)
        ]
        route = PriorTokens(model, "speculative-jacobi:window=8")
        posted = {name: [one[name] for one in asked_of] for name in asked_of[0]}
        answers = route.draw(route.read(posted))
        equal = [
            same and answer["output_ids"][:places] == own.tolist()
            for same, answer, own in zip(equal, answers, served, strict=True)
        ]
    print(
        json.dumps(
            {
                "equal": equal,
                "calls": calls,
                "places": places,
                "most": most,
                "different": len({tuple(own.tolist()) for own in served}),
                "codes": len(set(served.flatten().tolist())),
            }
        )
    )


if __name__ == "__main__":
    main()
