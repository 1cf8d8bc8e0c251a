"""Processes without an ask port: replicas ask by their keys, as in virtual time, and where a test looks at these.

python portless.py gateway --etcd etcd://...   # ftcoord's commands, in such a process
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest.mock import patch

from ftcoord.coordination import ask_desk


@contextlib.contextmanager
def portless() -> Iterator[None]:
    """Whoever decides can be asked through etcd only."""
    with patch.object(ask_desk, "listen_for", lambda _job: (None, "")):
        yield


if __name__ == "__main__":
    from ftcoord.cli import main

    with portless():
        sys.exit(main())
