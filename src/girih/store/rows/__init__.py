"""The rows of a shard: their layout in memory, and the keys that have rows."""
