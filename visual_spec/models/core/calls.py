"""The kinds of calls that models answer and samplers make, as `protocol` defines them. Plain strings, no PyTorch."""

RASTER = "raster"  # NextTokenModel: a window of tokens in raster order
TREE = "tree"  # TreeModel: several continuations of one sequence
ORDER = "order"  # OrderModel: positions out of raster order, each with its own mask
SCALES = "scales"  # ScaleModel: all tokens of a scale at once
COLUMNS = "columns"  # ColumnModel: columns of several codebooks
MASKED = "masked"  # MaskedModel: all hidden tokens at once
CHUNKS = "chunks"  # ChunkModel of `visual_spec.samplers.core.chunk_rollout`: chunks of frames
CONTINUOUS = "continuous"  # CausalLatentModel, MaskedLatentModel: conditions of tokens that are vectors

RASTER_TREE_ORDER = (RASTER, TREE, ORDER)
