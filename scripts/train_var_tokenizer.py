"""Train the embedded multi-scale tokenizer; the same as `python -m visual_spec.training.var_tokenizer`."""

from visual_spec.training.var_tokenizer import main

if __name__ == "__main__":
    main()
