"""A log of numbered segments, from which servers follow a run while it trains.

| module | what it holds |
|---|---|
| ``options`` | ``[publish]`` of a config |
| ``manifest`` | what a segment says of itself, and the head of a log |
| ``log`` | where everything lies, what is removed |
| ``part`` | one shard's rows of a segment, in a file |
| ``shards`` | those of the shards of one process, as they were at one moment |
| ``segment`` | a segment of all trainers, written while training goes on |

When a run publishes is in :mod:`girih.training.publisher`; who follows is in :mod:`girih.serving.follow`.
"""
