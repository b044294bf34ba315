"""Decides which operators of the dense half run on trainers, and which on group servers (HT §3.2.1). Pure functions of facts.

``tag.py`` combines the parts: rules, connected components, balance of dense bytes, greedy refinement.
"""
