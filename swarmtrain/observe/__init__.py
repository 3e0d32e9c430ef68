"""Typed events, metrics, status. Logs are derived from events."""
