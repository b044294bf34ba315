"""A Ray cluster of this host, for the example below ``deploy/``."""

from ray_head import ray_address

__all__ = ["ray_address"]
