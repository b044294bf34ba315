"""Tiers below memory: rows on a disk."""
