"""What a process counts and shows of itself: statistics, busy time, its status file, metrics for Prometheus, its log."""
