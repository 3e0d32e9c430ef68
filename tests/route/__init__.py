"""Proofs of the policies: who gets the next piece of work, who moves, how much is under way."""
