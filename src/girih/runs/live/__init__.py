"""What each process shows of itself while it runs: a file that ``girih status`` reads, metrics for Prometheus, a log."""
