"""Draw pictures from prompts, as `visual-spec generate`: python scripts/generate_images.py PROMPT... [--compare]"""

import sys

from visual_spec.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["generate", *sys.argv[1:]]))
