"""Observation of a process: statistics, busy time, its status file, metrics for Prometheus, its log."""
