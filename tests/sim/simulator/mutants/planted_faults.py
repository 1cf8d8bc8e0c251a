"""The planted faults: one line each, over all layers. Each is detected by one of the first seeds of its profiles."""

from __future__ import annotations

from typing import Final

from simulator.mutants.planting import Mutant

ROUNDS: Final = ("rounds", "whole jobs")
QUORUMS: Final = ("quorums", "whole jobs")
ENDS: Final = ("ends",)
ACCIDENTS: Final = ("accidents of rounds", "accidents of quorums")
STORES: Final = ("stores",)
TIMERS: Final = ("timers",)
VOTES: Final = ("votes",)
ALL: Final = ("rounds", "quorums", "heartbeats", "stores")

MUTANTS: Final = (
    # -- writes -------------------------------------------------------------------------------------------------------
    Mutant(
        "a record is replaced without its guard", "ftcoord.primitives.write_once",
        "compares = [api.unchanged(put.key, expected.mod_revision if expected else 0), *guards]",
        "compares = [*guards]", ALL,
    ),
    # -- the store ----------------------------------------------------------------------------------------------------
    Mutant(
        "a store's change is not fenced", "ftcoord.primitives.write_once",
        "guards=[*guards, *map(api.exists, self._fences)],", "guards=guards,", ROUNDS,
    ),
    Mutant(
        "a change whose answer was lost is made again", "ftcoord.primitives.write_once",
        "return self._made(outcome, look, deadline)",
        "return setattr(self, '_count', self._new_count()) if lost else self._made(outcome, look, deadline)", STORES,
    ),
    # -- mirrors and members ------------------------------------------------------------------------------------------
    Mutant(
        "one watch event is dropped after a read", "ftcoord.primitives.mirror",
        "if event.kv.mod_revision <= known:", "if event.kv.mod_revision <= known + 1:", ALL,
    ),
    # -- leases -------------------------------------------------------------------------------------------------------
    Mutant(
        "a lease is renewed when its time is over", "ftcoord.core.lease",
        "return self.sent_at + self.ttl * RENEW_AFTER", "return self.sent_at + self.ttl * 1.5", ALL,
    ),
    Mutant(
        "a member that leaves does not revoke its lease", "ftcoord.primitives.session",
        "if self.state is not SessionState.LOST:", "if False:", ALL,
    ),
    Mutant(
        "a sentinel does not give up leases", "ftcoord.primitives.sentinel_main",
        "etcd.client.revoke(one.id, timeout=etcd.timeout)", "pass", ALL,
    ),
    # -- rounds -------------------------------------------------------------------------------------------------------
    Mutant(
        "a round starts before all have taken their seats", "ftcoord.core.rendezvous",
        "    if now.ready:\n        return Outlook(Standing.ANSWERED",
        "    if True:\n        return Outlook(Standing.ANSWERED", ROUNDS,
    ),
    Mutant(
        "a recall is not noticed", "ftcoord.core.rendezvous",
        'return (max(1, now.waiting), now.recalled) if now.recalled else (0, "")', 'return 0, ""', ROUNDS,
    ),
    Mutant(
        "ranks are not kept", "ftcoord.core.rendezvous",
        "wanted = 0 if index == 0 else rank", "wanted = len(chosen) - 1 - index", ROUNDS,
    ),
    Mutant(
        "who lost its lease has no time to come back", "ftcoord.core.rendezvous",
        "return since + (whole if many else min(MOMENT, whole))", "return -inf", ("rounds",),
    ),
    Mutant(
        "nodes with other limits count", "ftcoord.core.rendezvous",
        "newest[ask.node] is member and ask.limits == self.limits:", "newest[ask.node] is member:", ("rounds",),
    ),
    Mutant(
        "a newcomer waits though there is room", "ftcoord.core.rendezvous",
        "if new and not previous.stop and len(previous.seats) - len(gone) < situation.limits[1]:", "if False:", ROUNDS,
    ),
    Mutant(
        "a spare recalls a full round", "ftcoord.core.rendezvous",
        "len(previous.seats) - len(gone) < situation.limits[1]:", "len(previous.seats) - len(gone) < 99:", ROUNDS,
    ),
    Mutant(
        "a run that finished is started again", "ftcoord.core.rendezvous",
        'return restart == "always" or (restart == "failed" and closed.outcome in (records.FAILED, records.STOPPED))',
        'return restart != "never"', ENDS,
    ),
    # -- quorums ------------------------------------------------------------------------------------------------------
    Mutant(
        "the join timeout is not awaited", "ftcoord.core.quorum",
        "if count != poll.alive and now < until:", "if False:", QUORUMS,
    ),
    Mutant(
        "shrink_only is ignored", "ftcoord.core.quorum",
        "if not (shrink_only and before) or name in before]", "if True]", QUORUMS,
    ),
    Mutant(
        "another member's answer is taken for one's own", "ftcoord.core.quorum",
        "if any(answered.get(member, 0) >= asked for member in me):",
        "if any(count >= asked for count in answered.values()):", QUORUMS,
    ),
    Mutant(
        "a request that nobody waits for is written again", "ftcoord.coordination.policy",
        "self._closed = self._asked\n", "pass\n", QUORUMS,
    ),
    Mutant(
        "the end of a connection withdraws what came on the next one", "ftcoord.core.asks",
        "if held.via == via:", "if held.via.process == via.process:", ("whole jobs",),
    ),
    # -- the group ----------------------------------------------------------------------------------------------------
    Mutant(
        "a decision is not guarded by the office", "ftcoord.primitives.group.group",
        "self._record.publish(decision, (self._office.guard,))", "self._record.publish(decision, ())", ROUNDS,
    ),
    Mutant(
        "a stuck decider keeps the office", "ftcoord.primitives.group.record",
        "sentinel=sentinel, rests=True)", "sentinel=sentinel)", ("quorums",),
    ),
    Mutant(
        "a lost key is no lost lease", "ftcoord.primitives.group.group",
        "if now is None or not is_member(now) or now.value not in (kv.value, *sent):", "if False:", ACCIDENTS,
    ),
    Mutant(
        "a deleted record calls nobody back", "ftcoord.primitives.group.participant",
        "record = self._of._use.parse(kv.key, kv.value) if kv else None",
        "record = self._of._use.parse(kv.key, kv.value) if kv else self.record", ("accidents of rounds",),
    ),
    Mutant(
        "a number is given again", "ftcoord.core.quorum",
        "number = max(previous.number if previous else 0, situation.highest.number, heard) + 1",
        "number = (previous.number if previous else 0) + 1", ("accidents of quorums",), ("ftcoord logs no error",),
    ),
    # -- votes --------------------------------------------------------------------------------------------------------
    Mutant(
        "two calls of one rank count as two ranks", "ftcoord.coordination.ranks",
        "len({one for one, _ in self._waiting.values()}) < self._world_size",
        "len(self._waiting) < self._world_size", VOTES,
    ),
    Mutant(
        "a group asks for a rank that has given up", "ftcoord.coordination.ranks",
        "return self._waiting.pop(future, None) is not None",
        "return self._waiting.get(future) is not None", VOTES,
    ),
    # -- timers -------------------------------------------------------------------------------------------------------
    Mutant(
        "a server does not look whether a worker still holds its timer", "ftcoord.timer.etcd_timer",
        "and holds(self._run.prefix, worker, request.timer)", "", TIMERS,
    ),
)  # fmt: skip
