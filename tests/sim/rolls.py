"""A use of the group for tests: whoever asks is answered by a roll with what it asks, once enough members are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from members import Roll, read

from ftcoord import concurrency
from ftcoord.core.verdict import Next, Outlook, Publish, Standing, Wait
from ftcoord.etcd.api import Etcd, KeyValue
from ftcoord.primitives.group.membership import ParticipantOptions
from ftcoord.primitives.group.participant import Participant
from ftcoord.primitives.group.policy import View
from ftcoord.primitives.group.use import Use


@dataclass(frozen=True)
class Called:
    """What a participant asks: to be on the roll, with this number at least."""

    name: str
    number: int = 0


@dataclass(frozen=True)
class RollRecord:
    """Who was there, and what each asked."""

    number: int
    members: Mapping[str, str]
    by: str


class EnoughRoll(Roll):
    """Calls the roll when enough members are there. `fail_once()` makes the thread of the next decider end."""

    def __init__(self, prefix: str, enough: int, broken: list[BaseException]) -> None:
        super().__init__(prefix)
        self._enough, self._broken = enough, broken

    def decide(self, view: View, me: str, now: float) -> Publish | Wait:
        if self._broken:
            raise self._broken.pop()
        if len(view.members) < self._enough:
            return Wait("not enough are there")
        return super().decide(view, me, now)


class RollUse(Use[RollRecord, Called]):
    def __init__(self, prefix: str, enough: int) -> None:
        self._prefix, self._enough, self._count = prefix, enough, 0
        self.broken: list[BaseException] = []
        self.nobody_asked = concurrency.event()

    @property
    def prefix(self) -> str:
        return self._prefix

    def policy(self) -> EnoughRoll:
        return EnoughRoll(self._prefix, self._enough, self.broken)

    def parse(self, key: str, value: bytes) -> RollRecord:
        return RollRecord(**read(KeyValue(key, value, 0, 0, 0, 0)))

    def stamp(self, ask: Called) -> Called:
        self._count += 1
        return replace(ask, number=self._count)

    def encode(self, ask: Called) -> bytes:
        return f"{ask.name}/{ask.number}".encode()

    def nobody_asks(self) -> None:
        self.nobody_asked.set()

    def outlook(self, record: RollRecord | None, me: Sequence[str], ask: Called) -> Outlook[Called]:
        said = [record.members[one] for one in me if one in record.members] if record else []
        if any(int(text.rpartition("/")[2]) >= ask.number for text in said):
            return Outlook(Standing.ANSWERED, Next.RETURN)
        return Outlook(Standing.PENDING)


class Caller:
    """A participant of the roll at `prefix`, in the process that makes it."""

    def __init__(
        self,
        etcd: Etcd,
        prefix: str,
        ttl: int,
        enough: int = 1,
        *,
        renews: bool = True,
        keeps_lease: bool = True,
    ) -> None:
        self.use = RollUse(prefix, enough)
        self.participant: Participant[RollRecord, Called] = Participant(
            etcd,
            self.use,
            ParticipantOptions(ttl, 60, 5.0, renews=renews, keeps_lease=keeps_lease),
        )
