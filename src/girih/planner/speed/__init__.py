"""Predicts training examples per second before a run, from the work that a step of each strategy gives to cores and links.

``step.py`` derives a speed from a step, and has the parts that all strategies share. Each other module has a kind of strategies.
"""
