"""A judge of histories that knows nothing of ftcoord or etcd: `python -m judge FILE...`, with tests/ on the path."""
