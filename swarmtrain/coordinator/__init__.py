"""Steps, leases, journal, checkpoints, status page."""
