"""One file per verb; parses, calls, prints. No logic lives here."""
