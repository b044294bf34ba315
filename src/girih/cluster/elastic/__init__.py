"""Roles that are added and removed while a run is on: requests, their outcome, and what the launcher does of it."""
