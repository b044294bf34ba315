"""A log of numbered segments, from which servers follow a run while it trains.

| module | what it holds |
|---|---|
| ``options`` | ``[publish]`` of a config |
| ``manifest`` | the manifest of a segment, and the head of a log |
| ``log`` | the layout of a log, and the removal of old segments |
| ``part`` | one shard's rows of a segment, in a file |
| ``shards`` | rows of the shards of one process, at one moment |
| ``segment`` | a segment of all trainers, written while training goes on |

:mod:`girih.training.publisher` decides when a run publishes. :mod:`girih.serving.follow` follows the log.
"""
