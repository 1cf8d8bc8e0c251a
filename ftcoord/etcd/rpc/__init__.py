"""etcd's v3 API over gRPC: the only place that imports gRPC, but for the gateway's server."""
