"""Train an embedded music model; the same as `python -m visual_spec.training.music`."""

from visual_spec.training.music import main

if __name__ == "__main__":
    main()
