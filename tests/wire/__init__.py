"""Proofs of the wire: what is sent is what arrives, and whatever else arrives is refused."""
