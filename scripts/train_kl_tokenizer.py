"""Train the embedded KL tokenizer on class pictures; the same as `python -m visual_spec.training.kl_tokenizer`."""

from visual_spec.training.kl_tokenizer import main

if __name__ == "__main__":
    main()
