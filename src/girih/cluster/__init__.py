"""Roles as processes, and what starts them. The launcher imports no torch, so names are in their own modules."""
