"""Real daemons, real libp2p, real signals."""
