"""Train the embedded VAR on shapes; the same as `python -m visual_spec.training.var`."""

from visual_spec.training.var import main

if __name__ == "__main__":
    main()
