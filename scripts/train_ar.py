"""Train the embedded LlamaGen and caption encoder; the same as `python -m visual_spec.training.ar`."""

from visual_spec.training.ar import main

if __name__ == "__main__":
    main()
