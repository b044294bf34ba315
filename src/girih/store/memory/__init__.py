"""The memory of a shard: arrays on one arena, and how they grow."""
