"""Proofs of the libp2p host: streams, addresses, relays, and what happens when p2pd or a cable goes."""
