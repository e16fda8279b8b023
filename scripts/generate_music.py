"""Play music from prompts, as `visual-spec generate --model tunes`: python scripts/generate_music.py PROMPT..."""

import sys

from visual_spec.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["generate", "--music", *sys.argv[1:]]))
