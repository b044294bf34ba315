"""Predicts training examples per second before a run.

The prediction comes from the work that a step of each strategy gives to cores and links. ``step.py`` computes a speed
from a step, and has the parts that all strategies share. Each other module has one kind of strategies.
"""
