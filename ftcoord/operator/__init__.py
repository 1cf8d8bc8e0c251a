"""What an operator looks at and does: jobs as etcd's keys tell of them, findings about an etcd, and what ends a job."""
