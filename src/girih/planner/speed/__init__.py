"""Training examples per second, predicted before a run: what a step of each strategy asks of cores, links and time.

``step.py`` says how a speed follows from a step; ``basis.py`` what all strategies' steps consist of; the others, a way to train each.
"""
