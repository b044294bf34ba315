"""Telemetry of a process: statistics, busy time, the status file, metrics for Prometheus, and the log."""
