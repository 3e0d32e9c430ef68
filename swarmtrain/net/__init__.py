"""libp2p host, calls and streams, DHT directory, link meters and caps."""
