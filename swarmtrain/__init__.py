"""swarmtrain: one transformer, trained across volunteers' machines over ordinary internet links."""

__version__ = "0.1.0"
