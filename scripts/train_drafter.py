"""Train an EAGLE drafter for a model; the same as `python -m visual_spec.training.drafter`."""

from visual_spec.training.drafter import main

if __name__ == "__main__":
    main()
