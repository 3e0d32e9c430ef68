"""Tests of swarmtrain.coordinator: the parts that need no daemons."""
