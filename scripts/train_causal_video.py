"""Train the embedded chunk-by-chunk video model; the same as `python -m visual_spec.training.causal_video`."""

from visual_spec.training.causal_video import main

if __name__ == "__main__":
    main()
