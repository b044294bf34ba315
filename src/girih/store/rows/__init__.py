"""The rows of a shard: how they lie in memory, and which keys have one."""
