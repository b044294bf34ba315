"""Which operators of the dense half trainers run, and which the servers of their group (HT §3.2.1): pure functions of facts.

``tag.py`` puts it together: rules, connected components, balance of dense bytes, greedy refinement.
"""
