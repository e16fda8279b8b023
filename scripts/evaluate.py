"""Prompt accuracy of a model and a sampler over held-out prompts, resumable.

python scripts/evaluate.py --out runs/accuracy-plain
torchrun --nproc-per-node 8 scripts/evaluate.py --out runs/accuracy --sampler speculative-jacobi --samples 5000
"""

import sys

from visual_spec.eval.accuracy import main

if __name__ == "__main__":
    sys.exit(main())
