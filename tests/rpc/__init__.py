"""Proofs of the network: calls, links, limits, and what every fault of a stream leads to."""
