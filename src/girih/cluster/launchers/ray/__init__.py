"""Processes on the machines of a Ray cluster. Ray places and ends them; nothing of a batch goes through it.

``agent`` is the actor beside each process, ``launcher`` starts them and has a handle on each. Nothing else of the library imports ray.
"""
