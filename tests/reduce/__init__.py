"""Tests of swarmtrain.reduce: the parts that need no daemons."""
