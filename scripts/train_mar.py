"""Train an embedded model of continuous tokens; the same as `python -m visual_spec.training.mar`."""

from visual_spec.training.mar import main

if __name__ == "__main__":
    main()
