"""What operators see and do: the state of jobs by their keys in etcd, findings about an etcd cluster, and orders to
jobs."""
