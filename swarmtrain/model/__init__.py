"""Transformer blocks, stages, the subspace, deterministic init, exact sums, the optimizer. Torch only, no I/O."""
