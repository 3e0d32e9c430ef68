"""Tests of swarmtrain.chain: the parts that need no daemons."""
