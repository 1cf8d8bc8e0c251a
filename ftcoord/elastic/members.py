"""The members of an elastic run: a use of the run's quorums. This module alone knows `ftcoord.coordination`.

A group is a quorum, and its number the quorum's. Members ask when they start and when their group is over, so a step
costs etcd nothing. Each watches the members' keys: one that is gone ends the group, one without a seat waits to join.

How a group ended is decided once, by the first who writes `ends/<number>` in the run's store: FINISHED by the last of
its members that finishes, else why it is over, by one who knows what the others may not: it lets a process in, or a
collective has failed. With FINISHED, `run/over` is written, and `run/stop` deleted, which had asked them to stop.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Collection
from contextlib import ExitStack
from typing import Final

from ftcoord import concurrency
from ftcoord.closing import Closing, weakly
from ftcoord.coordination.address import Job, connect
from ftcoord.coordination.replica import Replica, order_stop
from ftcoord.core import layout
from ftcoord.core.elastic import FINISHED, Arrangement, Place, arranged
from ftcoord.core.history import HistoryEvent
from ftcoord.core.quorum_records import QuorumRecord, parse_replica
from ftcoord.elastic.group import Group
from ftcoord.errors import EtcdError, FtcoordError
from ftcoord.escaping import named
from ftcoord.etcd.api import Delete, Get, KeyValue, Op, Put, Span
from ftcoord.logs import log_change
from ftcoord.primitives.deaths import causes_of
from ftcoord.primitives.group.record import event_puts
from ftcoord.primitives.group.use import ParsedKeys
from ftcoord.primitives.mirror import Informer, Mirror
from ftcoord.primitives.write_once import write_once
from ftcoord.store import EtcdStore, value_of

log = logging.getLogger(__name__)

LINE_INTERVAL: Final = 30.0
"""Seconds between two log lines of a wait."""
CONNECT_TIMEOUT: Final = 30.0
"""Seconds to look for etcd at the start."""
LEAVE_TIMEOUT: Final = 2.0
"""Seconds that leaving may take. After that the lease expires."""
STORE_TTL: Final = 600
"""Seconds that the run's store outlives the last member, and so that a finished run is known to be finished."""


class TooFewMembers(FtcoordError, TimeoutError):
    """Fewer members than `min_size` were there for `join_timeout`, or one of them did not come to the next group."""


class Members(Closing):
    """This process's part in a run. One thread calls all of it.

    Args:
        job: the run; its `min_replicas` is the fewest members of a group.
        join_timeout: seconds that `ask` waits for enough members.

    Raises RuntimeError when etcd does not answer.
    """

    def __init__(self, job: Job, join_timeout: float) -> None:
        self._join_timeout = join_timeout
        self._run, self._fewest = job.name, job.min_replicas
        local = os.environ.get("LOCAL_RANK", "0")
        self.name = f"{socket.gethostname()}/{local}-{secrets.token_hex(3)}"
        # Live members are always waited for: whoever is stuck is lost with its lease.
        self._job, self._etcd = connect(str(job), CONNECT_TIMEOUT)
        self._ends = ExitStack()
        self._ends.callback(self._etcd.close)
        self._prefix = self._job.prefix
        self._over_key, self._stop_key = layout.elastic_over_key(self._prefix), layout.elastic_stop_key(self._prefix)
        self._since = self._etcd.get(self._over_key).revision
        """etcd's revision when this process came: a run that had stopped before is continued."""
        self.store = self.open_store()
        self._ends.callback(self.store.close)
        self._replica = Replica(self._etcd, self._job, self.name, keeps_lease=True)
        self._is_over = concurrency.event()  # the run; set by the watch's thread
        self._cause = ""
        self._ends.callback(lambda: self._replica.leave(LEAVE_TIMEOUT, self._cause))
        self._group: Group | None = None  # which the watch reports to; any thread
        # Only the watch's thread:
        self._seen: set[str] = set()
        """Members that were there."""
        self._replicas = ParsedKeys(parse_replica)
        spans = [
            layout.members_span(self._prefix),
            layout.elastic_ends_span(self._prefix),
            layout.elastic_run_span(self._prefix),
        ]
        report, failed = weakly(self._report), weakly(self._fail)
        self._watch = Informer(self._etcd, spans, report, "ftcoord-elastic", failed, gathers=True)
        self._ends.callback(self._watch.close)

    def close(self) -> None:
        """Leave the run, so that the others know at once. Idempotent."""
        self._group = None
        self._ends.close()

    def blame(self, cause: str) -> None:
        """Leave with this cause of death."""
        self._cause = cause

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(self, place: Place, before: Arrangement | None) -> Arrangement | None:
        """The next group: once all live members ask, and at least `min_size`. None if the run is over.

        Raises TooFewMembers, EtcdError, and FtcoordError for members that cannot form a group.
        """
        self._group = None
        deadline = concurrency.now() + self._join_timeout
        while not self._is_over.is_set():
            try:
                until = min(deadline, concurrency.now() + LINE_INTERVAL)
                found = self._arranged(self._replica.ask(place.request(self.name), until, self._is_over))
                if found is None or not found.odd:
                    return found
                log.warning("run %r: %s must leave: torch or the backend differ", self._run, named(found.odd))
            except TimeoutError as error:
                why = self._missing(before) or str(error)
                if self._is_over.is_set():
                    break
                if concurrency.now() >= deadline:
                    limit = f"join_timeout={self._join_timeout:g} s"
                    raise TooFewMembers(f"run {self._run!r} formed no group within {limit}: {why}") from None
                log_change(log, f"run {self._run!r}: {self.name} waits: {why}", run=self._run, reason=why)
        return None

    def _arranged(self, quorum: QuorumRecord) -> Arrangement | None:
        try:
            found = arranged(quorum.number, quorum.seats)
        except ValueError as error:
            raise FtcoordError(f"run {self._run!r}: {error}") from None
        if self.name in found.odd:
            raise FtcoordError(
                f"run {self._run!r}: this process re-forms groups in another way than the others: use one release of"
                " torch, and one backend, in all of a run"
            )
        # All of it may have come too late. The others' groups are formed after any earlier run has ended.
        is_first = not any(place.group for place in found.places)
        return None if is_first and self._ends_run(self._etcd.get(self._over_key).one) else found

    def _ends_run(self, over: KeyValue | None) -> bool:
        return over is not None and (over.value.startswith(FINISHED) or over.mod_revision > self._since)

    def open_store(self) -> EtcdStore:
        """The run's store, to be closed."""
        return EtcdStore(self._etcd, layout.elastic_store_prefix(self._prefix), ttl=STORE_TTL)

    def rank(self, arrangement: Arrangement) -> int:
        """This process's rank."""
        return arrangement.names.index(self.name)

    def _missing(self, before: Arrangement | None) -> str:
        """Who is missing since the last group; empty if etcd does not answer, or enough are there."""
        names = dict(zip(before.members, before.names, strict=True)) if before is not None else {}
        try:
            live = self._live()
            gone = [one for one in names if one not in live]
            causes = causes_of(self._etcd, self._prefix, gone)
        except EtcdError:
            return ""
        if len(live) >= self._fewest:
            return ""
        told = [f"{names[one]} ({causes.get(one) or 'its lease ended'})" for one in gone]
        missing = f"; missing: {named(told)}" if told else ""
        return f"{len(live)} of at least {self._fewest} members live{missing}. Start more, or lower min_size"

    def _live(self) -> Collection[str]:
        return {
            layout.member_of(kv.key)
            for kv in self._etcd.range(Get(layout.members_span(self._prefix), keys_only=True)).kvs
        }

    # -- the group's end ------------------------------------------------------------------------------------------

    def follow(self, group: Group) -> None:
        """Report to this group what happens to its members."""
        if (member := self._replica.participant.member) is not None:
            member.session.introduce()  # its sentinel runs before the others wait for this process
        self._group = group
        self._watch.report_again()

    def tell_end(self, group: Group) -> bool:
        """Tell the others that the group is over, if they may not know. Returns whether nobody else has told that."""
        self._group = None
        why = f"{group.over} ({self.name})"
        return not group.is_known and self.store.compare_set(f"ends/{group.number}", "", why) == why.encode()

    def finish(self, group: Group, how: str) -> bool:
        """Wait until all members finish. Returns False if the group is over before: those that are behind may need this
        one's state.

        Args:
            how: finished or stopped, a colon, and why.
        """
        key = f"ends/{group.number}"
        if self.store.add(f"finishing/{group.number}", 1) == group.world:
            self._write_end(group, how)
        while not group.left.wait(LINE_INTERVAL):
            text = f"run {self._run!r}: {self.name} has finished, and waits until all {group.world} members have"
            log_change(log, text, run=self._run)
        self._group = None
        return group.finished or self.store.compare_set(key, "", group.over) == FINISHED

    def _write_end(self, group: Group, how: str) -> None:
        """All members have finished, and nobody need stop any more."""
        lease = self._etcd.grant(STORE_TTL).id
        event = HistoryEvent("closed", group.number, reason=how, by=self.name, wall_ms=int(concurrency.wall() * 1000))
        also: list[Op] = [Put(self._over_key, how.encode(), lease), Delete(Span(self._stop_key))]
        if (record := self._etcd.get(layout.decided_key(self._prefix)).one) is not None:
            at = record.mod_revision
            also += event_puts(self._prefix, [event], record.lease, revision=at, writer=secrets.token_hex(8))
        end = Put(layout.elastic_end_key(self._prefix, group.number), FINISHED, lease)
        write_once(self._etcd, end, None, also=also, timeout=self._join_timeout)

    def ask_stop(self, reason: str) -> None:
        """Ask all members to stop at an agreed step; the first reason counts. Any thread."""
        left = order_stop(self._etcd, self._prefix, reason, by=self.name, timeout=self._join_timeout)
        if left:
            log.info("run %r: %s, but %s", self._run, reason, left)

    # -- the watch's thread ---------------------------------------------------------------------------------------

    def _report(self, members: Mirror, ends: Mirror, run: Mirror) -> None:
        group = self._group
        if self._ends_run(run.kvs.get(self._over_key)) and not self._is_over.is_set():
            self._is_over.set()
            self._replica.participant.nudge()
        live = {layout.member_of(key) for key in members.kvs}
        self._seen |= live
        if group is None:
            return
        if (ended := ends.kvs.get(layout.elastic_end_key(self._prefix, group.number))) is not None:
            why = value_of(ended)
            if why == FINISHED:
                group.finish()
            else:
                group.end(why.decode(errors="replace"))
        arrangement = group.arrangement
        for member, name in zip(arrangement.members, arrangement.names, strict=True):
            # The decision may be ahead of the watch, so a new member may only seem to be lost.
            if member not in live and (member in self._seen or self._is_gone(member)):
                group.end(f"{name} is lost")
        # While the members are to stop, who comes waits until they have, and ends then.
        new = live - {*arrangement.members} if self._stop_key not in run.kvs else set[str]()
        waiting = [kv for key, kv in members.kvs.items() if layout.member_of(key) in new]
        group.note_newcomer(next((one.request.replica_id for _, one in self._replicas.of(waiting)), ""))

    def _is_gone(self, member: str) -> bool:
        return self._etcd.get(layout.member_key(self._prefix, member)).one is None

    def _fail(self, error: BaseException) -> None:
        if self._group is not None:
            self._group.end(f"nobody watches its members: {error}", is_known=False)
