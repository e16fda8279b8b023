"""All that only a GPU can tell, in stages, for a machine that is borrowed for half an hour; `--help` says how.

python scripts/gpu_hour.py --out results [--budget 560] [--wheels wheels]
python scripts/gpu_hour.py --out results --dry-run
python scripts/gpu_hour.py --tables benchmarks/results/gpu
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout need not be installed

from visual_spec.eval.speed.gpu_hour import main

if __name__ == "__main__":
    sys.exit(main())
