"""A simulator of whole jobs: many processes, the real code, one etcd in memory, and what one seed does to them.

`python -m simulator --help`, with tests/sim on the path, says how to run it; docs/testing.md says what it does.
"""
