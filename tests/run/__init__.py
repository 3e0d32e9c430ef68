"""What a manifest accepts, refuses and means."""
