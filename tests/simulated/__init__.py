"""The simulated swarm: real daemons on virtual time."""
