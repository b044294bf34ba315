"""The state of a shard at one moment: read while the shard goes on, written to a file, restored."""
