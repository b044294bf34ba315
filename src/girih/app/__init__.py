"""A config file becomes a trainer; strategies are compared, and machines calibrated."""
