"""Each process shows itself while it runs: a file that ``girih status`` reads, metrics for Prometheus, a log."""
