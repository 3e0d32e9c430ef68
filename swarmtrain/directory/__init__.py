"""The run's directory: a DHT of signed records."""
