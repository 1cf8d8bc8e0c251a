"""A simulator of whole jobs: many processes, the real code, one etcd in memory, and what one seed does to them.

docs/reliability.md describes how to run it and what it checks. tests/sim and tests must be on the path.
"""
