"""Predictions: costs and placements as pure functions of numbers, which touch no live object."""
