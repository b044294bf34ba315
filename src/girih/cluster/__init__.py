"""Processes of a run, by role, and the launchers that start them.

The launcher imports no torch, so names are in separate modules.
"""
