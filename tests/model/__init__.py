"""Proofs of the model: what a split, a boundary, a sum and an optimizer step must not change."""
