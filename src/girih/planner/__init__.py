"""Predicts costs and decides placements, as pure functions of numbers without live objects."""
