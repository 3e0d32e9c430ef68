"""Corpora, token shards, the sampler."""
