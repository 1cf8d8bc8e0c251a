"""A plug-in for torchft's own tests: its native classes, but behind ftcoord's gateway in place of its lighthouse.

`-p behind_gateway`, with FTCOORD_ENDPOINTS in the environment. Nothing else is replaced: managers, clients and ranks
are torchft's native ones, which speak with the gateway in torchft's protocol.
"""

from __future__ import annotations

from typing import Any

import torchft._torchft as native

from ftcoord.coordination import Gateway, LighthouseServer


class GatewayServer:
    """What torchft's tests take for a lighthouse: a gateway, each on a job of its own with the rules that it is given.

    Args: those of torchft's LighthouseServer.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._job = LighthouseServer(*arguments, **named)
        self._gateway = Gateway(self._job.address())

    def address(self) -> str:
        """Of torchft's kind, for native clients."""
        return self._gateway.address()

    def shutdown(self) -> None:
        """End both."""
        self._gateway.shutdown()
        self._job.shutdown()


native.LighthouseServer = GatewayServer
