"""One run from its plan to its summary: planned, opened, resumed, rescaled, closed."""
