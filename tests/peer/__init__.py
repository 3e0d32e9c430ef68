"""Tests of swarmtrain.peer: the parts that need no daemons."""
