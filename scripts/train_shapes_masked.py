"""Train the embedded masked model; the same as `python -m visual_spec.training.masked_image`."""

from visual_spec.training.masked_image import main

if __name__ == "__main__":
    main()
