"""In-stage reduction: who owns which slice, sum, share."""
