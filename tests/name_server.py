"""A DNS server on loopback, with SRV records. As a script it serves on port 53: `name_server.py RECORDS`, as JSON."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

Records = Mapping[str, Sequence[tuple[str, int]]]
"""By the name of an SRV record: hosts and ports, the first one to be tried first."""


class NameServer:
    """Answers from `records`, which may change, until the end of its block."""

    def __init__(self, records: Records, port: int = 0) -> None:
        self.records = dict(records)
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self.serve)

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def serve(self) -> None:
        while True:
            data, sender = self._socket.recvfrom(65536)
            if not data:
                return
            self._socket.sendto(self._answer(dns.message.from_wire(data)), sender)

    def _answer(self, query: dns.message.Message) -> bytes:
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        self.asked.append(name)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        found = self.records.get(name) if question.rdtype == dns.rdatatype.SRV else None
        if found is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        else:
            texts = [f"{at} 0 {port} {host}." for at, (host, port) in enumerate(found)]
            answer.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", "SRV", texts))
        return answer.to_wire()


def use(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process's resolvers ask this server, in place of those of /etc/resolv.conf."""

    def read(resolver: dns.resolver.Resolver, _: object) -> None:
        resolver.nameservers, resolver.port = ["127.0.0.1"], server.port

    monkeypatch.setattr(dns.resolver.Resolver, "read_resolv_conf", read)


if __name__ == "__main__":
    NameServer(json.loads(sys.argv[1]), 53).serve()
