"""Decides which operators of the dense half run on trainers, and which run on group servers (HT §3.2.1).

All functions are pure functions of facts. ``tag.py`` combines the parts: rules, connected components, balance of dense
bytes, and greedy refinement.
"""
