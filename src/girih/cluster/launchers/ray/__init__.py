"""Processes on the machines of a Ray cluster. Ray places and ends them; no data of a batch goes through it.

``agent`` is the actor of each process. ``launcher`` starts them and has a handle for each. No other module imports ray.
"""
