"""Metrics for Prometheus: of this process, and of all runs on an etcd cluster. docs/monitoring.md lists them."""
