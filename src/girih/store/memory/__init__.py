"""The memory of a shard: arrays on one arena that can grow."""
