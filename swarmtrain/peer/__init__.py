"""The volunteer's daemon: life cycle, compute, ledger, state transfer."""
