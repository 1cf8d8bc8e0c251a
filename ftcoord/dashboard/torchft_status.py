"""What torchft's lighthouse shows at `/status`, for a job in etcd, with the words that its users look for. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import urlencode

from ftcoord.operator.job_keys import LeaseTime
from ftcoord.operator.told import JobStatus, MissingReplica, QuorumStatus, ReplicaStatus


def status_page(status: JobStatus, leases: Mapping[str, LeaseTime], now: float) -> str:
    """HTML without scripts. Everything that comes from etcd is escaped.

    Args:
        leases: the members' leases, as far as they are known.
        now: seconds since 1970.
    """
    live = f"./?{urlencode({'job': status.job})}"
    body = "\n".join(_lines(status.quorum, leases, now))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(status.job)} · Lighthouse status · ftcoord</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/page.css">
</head>
<body data-link="live">
<main>
<p><a href="{escape(live)}">{escape(status.job)}, live</a></p>
{body}
</main>
</body>
</html>
"""


def _lines(quorum: QuorumStatus | None, leases: Mapping[str, LeaseTime], now: float) -> Iterator[str]:
    yield f"Current quorum_id: {quorum.id if quorum else 0} <br>"
    yield f"Next quorum status: {escape(quorum.next.reason if quorum else 'no replica is there')}"
    yield "<h3>Previous Quorum</h3>"
    if quorum is not None and quorum.id:
        yield f"Previous quorum id: {quorum.id} <br>"
        yield f"Num participants: {quorum.size} <br>"
        yield f"Quorum age: {max(now - quorum.created, 0):.1f}s"
        yield from (_participant(one) for one in quorum.replicas if one.rank is not None)
        yield from (_gone(one) for one in quorum.missing)
    yield "<h2>Heartbeats</h2>"
    yield "<ul>"
    yield from (_heartbeat(one, leases.get(one.member)) for one in (quorum.replicas if quorum else ()))
    yield "</ul>"


def _participant(one: ReplicaStatus) -> str:
    heals = f" (heals from {escape(one.heals_from)})" if one.heals_from else ""
    return f"""<div class="card member{" recovering" if one.behind else ""}">
<b>{escape(one.replica_id)}</b> <br>
Step: {one.step}{heals} <br>
Manager: {escape(one.address)} <br>
TCPStore: {escape(one.store_address)} <br>
World size: {one.world_size} <br>
</div>"""


def _gone(one: MissingReplica) -> str:
    cause = escape(one.cause or "nobody has said why yet")
    return f'<div class="card member missing"><b>{escape(one.replica_id)}</b> <br> is gone: {cause}</div>'


def _heartbeat(one: ReplicaStatus, lease: LeaseTime | None) -> str:
    left = f"its lease has {lease.left} of {lease.ttl} s left" if lease else "it lives"
    return f'<li class="heartbeat">{escape(one.replica_id)}: {left}</li>'
