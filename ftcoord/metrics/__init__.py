"""Numbers for Prometheus: of this process, and of all runs on an etcd. docs/monitoring.md lists them."""
