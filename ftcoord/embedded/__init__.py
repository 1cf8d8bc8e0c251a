"""Local etcd servers and clusters, which end with the process that started them."""
