"""Layers that models share: plain torch modules, with B examples as the first dimension."""
