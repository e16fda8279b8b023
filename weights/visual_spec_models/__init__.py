"""Weights of the models that visual_spec loads by name. `visual_spec.pipelines.embedded` finds this folder."""
