"""What a run is: manifest, presets, invite, schedules. Pure data, no torch."""
