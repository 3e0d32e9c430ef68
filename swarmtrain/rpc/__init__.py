"""Links between daemons: frames, calls, flow control, limits."""
