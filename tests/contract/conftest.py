"""Fixtures of the contract tests."""

from rdzv_nodes import make_nodes as make_nodes
