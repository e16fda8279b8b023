"""What samplers gain and what it costs in quality: `visual-spec eval` as a script, for torchrun.

python scripts/evaluate.py --out runs/quality --samplers speculative-jacobi:window=32
torchrun --nproc-per-node 8 -- scripts/evaluate.py --out runs/quality --samplers speculative-jacobi --samples 50000
"""

import sys

from visual_spec.commands.eval import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
