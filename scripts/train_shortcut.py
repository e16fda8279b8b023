"""Train the shortcut of a masked model; the same as `python -m visual_spec.training.shortcut`."""

from visual_spec.training.shortcut import main

if __name__ == "__main__":
    main()
