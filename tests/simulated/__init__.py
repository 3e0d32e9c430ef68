"""The real daemons in simulated time: short scripts of what goes wrong."""
