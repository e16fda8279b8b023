"""The kinds of calls that models answer and samplers make, as `protocol` defines them. Plain strings, no PyTorch."""

RASTER = "raster"  # NextTokenModel: a window of tokens in raster order
TREE = "tree"  # TreeModel: several continuations of one sequence
ORDER = "order"  # OrderModel: positions out of raster order, each with its own mask
ANY_ORDER = "any-order"  # AnyOrderModel: any slots, each asked by name
OWN_ORDER = "own order"  # TrainedOrderModel, or an OrderModel of raster order: the steps it was trained for
SCALES = "scales"  # ScaleModel: all tokens of a scale at once
COLUMNS = "columns"  # ColumnModel: columns of several codebooks
MASKED = "masked"  # MaskedModel: all hidden tokens at once
FRAMES = "frames"  # FrameModel: all hidden tokens of a frame at once, one frame after the other
CHUNKS = "chunks"  # ChunkModel of `visual_spec.samplers.continuous.chunk_rollout`: chunks of frames
CONTINUOUS = "continuous"  # CausalLatentModel, MaskedLatentModel: conditions of tokens that are vectors
DISTILLED = "distilled"  # DistilledModel: all tokens of a picture from its noise

RASTER_TREE_ORDER = (RASTER, TREE, ORDER, OWN_ORDER)
