"""The simulated swarm: the real daemons in one process, on virtual time, from a seed. See docs/simulated-swarm.md."""
