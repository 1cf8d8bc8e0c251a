"""The judge's command: `python -m judge FILE...`, with tests/ on the path."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from judge.history import MalformedHistoryError, read
from judge.linearizability import UndecidedError, findings


def main(arguments: list[str] | None = None) -> int:
    """0 if all histories are linearizable, 1 if one is not, 2 if one cannot be read or decided."""
    parser = argparse.ArgumentParser(prog="judge", description="tell whether histories are linearizable")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="one operation a line, as JSON")
    worst = 0
    for path in parser.parse_args(arguments).files:
        worst = max(worst, _judge(path))
    return worst


def _judge(path: Path) -> int:
    try:
        with path.open(encoding="utf-8") as lines:
            history = read(lines)
        found = [*findings(history)]
    except (OSError, MalformedHistoryError, UndecidedError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    for one in found:
        print(f"{path}: {one}")
    if not found:
        print(f"{path}: {len(history)} operations, linearizable")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
