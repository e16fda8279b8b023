"""Train the causal layer of a masked model; the same as `python -m visual_spec.training.causal_layer`."""

from visual_spec.training.causal_layer import main

if __name__ == "__main__":
    main()
