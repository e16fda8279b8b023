"""Compare laws (temperature, top-p, guidance) of a model of `shapes` or `things` by what the parser of the data reads.

python benchmarks/laws.py --prompts 200 --temperature 1 0.8 --top-p 1 0.9 --guidance-scale 1.5 --out FILE
python benchmarks/laws.py --model FOLDER --prompts 2000 --first 200 --temperature 0.6 --top-p 1 --guidance-scale 1.5

The first prompts of the held-out list choose a law; others (`--first`) measure it. Prints the mean share of right
attributes and the share of wholly right prompts with 95 % intervals.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from visual_spec.data import shapes_parser, things, things_parser
from visual_spec.data.captions import captions_of
from visual_spec.eval.draws import seeded
from visual_spec.eval.quality.accuracy import accuracy_table, summarise
from visual_spec.files.documents import write_json
from visual_spec.pipelines.image import ImagePipeline


def measure(pipe: ImagePipeline, prompts: list[str], first: int, batch: int, **law: Any) -> dict[str, Any]:
    """Scores of one picture a prompt, drawn with `law`; the seed of a picture is the number of its prompt."""
    score = (things_parser if captions_of(pipe) is things else shapes_parser).score
    hits = []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        seeds = seeded(first + start, len(some))
        pictures = pipe(some, generator=seeds, output_type="pil", **law).images
        hits += [score(text, picture) for text, picture in zip(some, pictures, strict=True)]
    return {"law": law, **summarise(hits)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="shapes", help="name or folder")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="prompts of the list to leave out")
    parser.add_argument("--temperature", type=float, nargs="+", default=[None])
    parser.add_argument("--top-p", type=float, nargs="+", default=[None])
    parser.add_argument("--guidance-scale", type=float, nargs="+", default=[None])
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pipe = ImagePipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    prompts = captions_of(pipe).held_out_prompts(args.first + args.prompts)[args.first :]
    rows = []
    for temperature, top_p, scale in product(args.temperature, args.top_p, args.guidance_scale):
        law = {"temperature": temperature, "top_p": top_p, "guidance_scale": scale}
        rows.append(measure(pipe, prompts, args.first, args.batch, **law))
        print(accuracy_table({str(pipe.make_law(**law)): rows[-1]}), flush=True)
    if args.out:
        document = {"model": args.model, "first prompt": args.first, "rows": rows}
        write_json(args.out, document, indent=1)


if __name__ == "__main__":
    main()
