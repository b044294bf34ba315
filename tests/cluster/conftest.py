"""What tests of launchers share."""

from ray_head import ray_address

__all__ = ["ray_address"]
