"""The second storey: samplers and models that are true to their papers and do not pay, or not yet.

Same contracts and proofs as the core, which imports nothing of it: `table` registers them by the entry points
`visual_spec.samplers` and `visual_spec.families` of pyproject.toml, as another package would (docs/EXTENDING.md).
"""
