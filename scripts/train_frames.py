"""Train the frame-by-frame masked model of clips; the same as `python -m visual_spec.training.frames`."""

from visual_spec.training.frames import main

if __name__ == "__main__":
    main()
