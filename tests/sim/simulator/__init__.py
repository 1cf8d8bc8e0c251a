"""A simulator of whole jobs: many processes, the real code, one etcd in memory, and what one seed does to them.

`python -m simulator --help`, with tests/sim and tests on the path, says how to run it; docs/testing.md what it does.
"""
