"""Train the embedded VQ tokenizer on procedural shapes; the same as `python -m visual_spec.training.tokenizer`."""

from visual_spec.training.tokenizer import main

if __name__ == "__main__":
    main()
