"""Train the network that compares `shapes` pictures; the same as `python -m visual_spec.training.classifier`."""

from visual_spec.training.classifier import main

if __name__ == "__main__":
    main()
