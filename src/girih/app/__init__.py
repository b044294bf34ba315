"""Makes a trainer from a config file, compares strategies, and calibrates machines."""
