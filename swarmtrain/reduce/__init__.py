"""The all-reduce of a stage's gradient: partition among owners, formats on the wire, gradient codecs."""
