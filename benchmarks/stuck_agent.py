"""torchrun, whose process hangs in C with the interpreter's lock held, for HANG seconds, at each SIGUSR1."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

HANG: Final = 30


def _hang(*_: object) -> None:
    ctypes.PyDLL(None).usleep(HANG * 1_000_000)


def main() -> None:
    signal.signal(signal.SIGUSR1, _hang)
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
