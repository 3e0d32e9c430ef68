"""The discrete-event swarm: route/ and the coordinator's policies at 10,000 peers."""
