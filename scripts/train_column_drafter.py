"""Train an EAGLE drafter of columns for a music model; the same as `python -m visual_spec.training.column_drafter`."""

from visual_spec.training.column_drafter import main

if __name__ == "__main__":
    main()
