"""Exit codes of all commands; docs/cli.md has them too."""

from __future__ import annotations

from typing import Final

DONE: Final = 0
HEALTHY: Final = DONE
NOT_DONE: Final = 1
UNHEALTHY: Final = NOT_DONE
WRONG_USE: Final = 2
UNREACHABLE: Final = 3
"""etcd cannot be reached, or did not answer what was written."""
INTERRUPTED: Final = 130
