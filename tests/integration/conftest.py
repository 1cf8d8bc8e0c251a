"""Fixtures of the integration tests."""

from rdzv_nodes import make_nodes as make_nodes
