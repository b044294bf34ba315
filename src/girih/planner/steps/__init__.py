"""Graphs of the work and the messages of one step, as each strategy really does them.

``graph.py`` has the graph, ``basis.py`` the work that all strategies share, ``fold.py`` a summary without queues. Each
other module has one kind of strategies.
"""
