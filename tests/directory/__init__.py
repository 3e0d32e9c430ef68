"""Proofs of the directory: records, lookups, and what a hostile node can do to them."""
