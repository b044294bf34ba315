"""The state of a shard at one moment: read while the shard is in use, written to a file, restored."""
