"""The libp2p host over hivemind's p2pd: identity, addresses, streams, relays."""
