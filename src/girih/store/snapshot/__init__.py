"""Snapshots: the state of a shard at one moment. They are taken while the shard is in use, saved and restored."""
