"""etcd's v3 API over gRPC: the only package that imports gRPC, except for the gateway's server."""
