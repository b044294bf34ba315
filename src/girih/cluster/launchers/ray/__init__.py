"""Processes on the machines of a Ray cluster. Ray places and ends them; nothing of a batch goes through it.

``agent`` is the actor beside each process, ``process`` its handle, ``launcher`` starts them. Nothing else of the library imports ray.
"""
