"""Train the up-sampler of multi-scale decoding; the same as `python -m visual_spec.training.upsampler`."""

from visual_spec.training.upsampler import main

if __name__ == "__main__":
    main()
