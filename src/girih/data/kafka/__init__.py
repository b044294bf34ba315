"""Kafka topics as a source of examples: records by partition and offset."""
