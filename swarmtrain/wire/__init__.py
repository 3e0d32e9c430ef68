"""The messages: typed, versioned, strictly decoded. No I/O."""
