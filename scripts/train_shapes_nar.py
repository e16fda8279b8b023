"""Train the embedded near-to-far model; the same as `python -m visual_spec.training.flashar`."""

from visual_spec.training.flashar import main

if __name__ == "__main__":
    main()
