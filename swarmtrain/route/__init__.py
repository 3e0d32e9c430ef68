"""Which peer next, which stage needs help. Pure functions."""
