"""Train the embedded video model and its caption encoder; the same as `python -m visual_spec.training.motion`."""

from visual_spec.training.motion import main

if __name__ == "__main__":
    main()
