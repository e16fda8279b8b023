"""Networks, tokenizers and the embedded weights. Import the modules themselves; this file stays free of PyTorch."""

# The link `models` at the repository root also leads here; a second copy of every class would fail isinstance checks.
if __name__ != "visual_spec.models":
    raise ImportError(f"this package was imported as {__name__!r}; import visual_spec.models instead")
