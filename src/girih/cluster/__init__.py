"""Roles as processes, and their launchers. The launcher imports no torch, so names are in separate modules."""
