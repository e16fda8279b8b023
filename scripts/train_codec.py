"""Train the embedded codec on procedural tunes; the same as `python -m visual_spec.training.codec`."""

from visual_spec.training.codec import main

if __name__ == "__main__":
    main()
