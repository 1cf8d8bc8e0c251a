"""The planted faults: one line each, over all layers."""

from __future__ import annotations

from typing import Final

from simulator.mutants.plans import (
    A_HOST_DIES_AND_THE_RECORD_IS_GONE,
    A_LARGE_ROUND_IS_LOST_WITH_ITS_ROLL,
    A_PEER_DIES_WHILE_ANSWERS_ARE_LOST,
    AN_ID_STANDS_FOR_OTHERS,
    BACK_UNDER_ANOTHER_LEASE_AND_THE_RECORD_IS_GONE,
    CUT_OFF_WHILE_ETCD_IS_RESTORED,
    DECIDED_TWICE_AND_DELETED_BETWEEN,
    JOINS_BEHIND_A_DELETED_KEY,
    LEFT_BEHIND_AND_THE_RECORD_IS_GONE,
    LEFT_IN_AN_EARLIER_ROUND,
    RESTORED_BEFORE_AND_AFTER_ALL_ASK,
    RESTORED_TO_AN_END_THAT_WAS_LEFT_BEHIND,
    ROSTERS_ARE_DELETED,
    SENT_BEFORE_A_RESTORE,
    THE_LAST_DECISION_IS_MISSED,
    THE_OTHERS_FINISH_WITHOUT_ONE,
    TWO_ROUNDS_HAVE_ONE_NUMBER,
)
from simulator.mutants.planting import Mutant

ROUNDS: Final = ("rounds", "restores")
QUORUMS: Final = ("quorums", "lost quorums")
HEARTBEATS: Final = ("heartbeats",)
RESTORES: Final = ("restores",)
ENDS: Final = ("ends", "lost ends")
STORES: Final = ("stores",)
TIMERS: Final = ("timers",)
VOTES: Final = ("votes",)
ALL: Final = ("rounds", "quorums", "heartbeats", "stores")

MUTANTS: Final = (
    # -- writes -------------------------------------------------------------------------------------------------------
    Mutant(
        "a record is replaced without its guard", "ftcoord.primitives.write_once",
        "compares = [unchanged(put.key, expected.mod_revision if expected else 0), *guards]", "compares = [*guards]",
        ALL,
    ),
    Mutant(
        "a write that another one preceded counts as done", "ftcoord.primitives.write_once",
        "done = kv is not None and kv.value == put.value", "done = kv is not None", ALL,
    ),
    Mutant(
        "a member that lost its membership still decides", "ftcoord.primitives.group.decider",
        "(unchanged(mine.key, mine.mod_revision),)", "()", ALL,
    ),
    Mutant(
        "a decision counts though it comes late", "ftcoord.primitives.group.decider",
        "unchanged(mine.key, mine.mod_revision)", "exists(mine.key)", ("quorums",),
        plans=(SENT_BEFORE_A_RESTORE,),
    ),
    Mutant(
        "a decision without a record counts after another one", "ftcoord.primitives.group.decided_record",
        "[unchanged(self._era_key, self._era.mod_revision if self._era else 0)]", "[]", ("quorums",),
        plans=(DECIDED_TWICE_AND_DELETED_BETWEEN,),
    ),
    Mutant(
        "a quorum's roster is written without its guard", "ftcoord.primitives.group.decided_record",
        "return [unchanged(self._roster_key, self._roster.mod_revision if self._roster else 0)]", "return []",
        ("quorums",), plans=ROSTERS_ARE_DELETED,
    ),
    Mutant(
        "a roster that is deleted is not put back", "ftcoord.primitives.group.decided_record",
        "if known is None or any(put.key == known.key for put in puts):", "if True:", ("quorums",),
    ),
    # -- the store ----------------------------------------------------------------------------------------------------
    Mutant(
        "a store's change is not fenced", "ftcoord.primitives.write_once",
        "guards=[*guards, *(fence.guard for fence in self._fences)],", "guards=guards,", ROUNDS,
    ),
    Mutant(
        "a change whose answer was lost is made again", "ftcoord.primitives.write_once",
        "return self._made(outcome, look, deadline)",
        "return setattr(self, '_count', self._new_count()) if lost else self._made(outcome, look, deadline)", STORES,
    ),
    Mutant(
        "compare_set does not compare", "ftcoord.store.store",
        'guard = Compare(name, "value", "=", stored(wanted)) if wanted else absent(name)',
        'guard = Compare(name, "version", ">", 0) if wanted else absent(name)', STORES,
    ),
    # -- mirrors and members ------------------------------------------------------------------------------------------
    Mutant(
        "no member asks whether a watch has missed the last change", "ftcoord.primitives.mirror",
        "if {kv.key: kv.mod_revision for kv in now.kvs} != {key: kv.mod_revision for key, kv in self.kvs.items()}:",
        "if False:", ALL, plans=(THE_LAST_DECISION_IS_MISSED,),
    ),
    Mutant(
        "one watch event is dropped after a read", "ftcoord.primitives.mirror",
        "if event.kv.mod_revision <= known:", "if event.kv.mod_revision <= known + 1:", ALL,
    ),
    Mutant(
        "a copy is not doubted when its watch began again", "ftcoord.primitives.mirror",
        "if self._began is not None and item is not self._began:", "if False:", ("restores", "lost quorums"),
        plans=(CUT_OFF_WHILE_ETCD_IS_RESTORED,),
    ),
    Mutant(
        "a member's key that is gone is not put back", "ftcoord.primitives.group.group",
        "self._member_key.restore()", "pass", ("rounds",),
    ),
    Mutant(
        "a backup's value of a member's key counts as a later one", "ftcoord.primitives.group.member_key",
        "now.value in (mine.value, self._sent)", "now.mod_revision >= mine.mod_revision", RESTORES,
        plans=(RESTORED_BEFORE_AND_AFTER_ALL_ASK,),
    ),
    Mutant(
        "the oldest member does not know that it is", "ftcoord.primitives.group.succession",
        "self._ahead, self.is_first = None, True", "self._ahead = None", ALL,
    ),
    Mutant(
        "a member that is gone is still followed", "ftcoord.primitives.group.succession",
        "return kv is not None and is_member(kv) and kv.create_revision < self._mine.kv.create_revision",
        "return True", ALL,
    ),
    Mutant(
        "a decider decides by the wall clock", "ftcoord.primitives.group.decider",
        "verdict = self._policy.decide(self._view(in_order), self._member_key.id, concurrency.now())",
        "verdict = self._policy.decide(self._view(in_order), self._member_key.id, concurrency.wall())", QUORUMS,
    ),
    Mutant(
        "who joins does not read the key of the member ahead", "ftcoord.primitives.group.succession",
        "self._follow(last, found.revision, FIRST_READ_AFTER)", "self._follow(last, found.revision, READ_INTERVAL)",
        ROUNDS, plans=(JOINS_BEHIND_A_DELETED_KEY,),
    ),
    Mutant(
        "the member ahead is not watched", "ftcoord.primitives.group.succession",
        "Mirror(self._etcd, Span(predecessor.key), self._post, deletes_only=True)",
        "Mirror(self._etcd, Span(predecessor.key), lambda *_: None, deletes_only=True)", ALL,
    ),
    Mutant(
        "a watch that goes on drops the first event", "virtual.backend",
        "missed = self._keys.since(subscription.span, start_revision, subscription.deletes_only)",
        "missed = self._keys.since(subscription.span, start_revision, subscription.deletes_only)[1:]", ALL,
        plans=(A_PEER_DIES_WHILE_ANSWERS_ARE_LOST,),
    ),
    # -- leases -------------------------------------------------------------------------------------------------------
    Mutant(
        "a lease is renewed when its time is over", "ftcoord.core.lease",
        "return self.sent_at + self.ttl * RENEW_AFTER", "return self.sent_at + self.ttl * 1.5", ALL,
    ),
    Mutant(
        "a member that leaves does not revoke its lease", "ftcoord.primitives.session",
        "if kept.state is not SessionState.LOST:", "if False:", ALL,
    ),
    Mutant(
        "a lease is renewed after its owner has gone", "ftcoord.primitives.session",
        "self._renewer.move(self, _Phase.ENDED, _Phase.KEPT, _Phase.ENDING)", "pass", ALL,
    ),
    Mutant(
        "a sentinel does not give up leases", "ftcoord.primitives.sentinel_main",
        "etcd.client.revoke(one.id, timeout=etcd.timeout)", "pass", ALL,
    ),
    Mutant(
        "a lease is trusted to its full TTL", "ftcoord.core.lease",
        "return self.sent_at + self.ttl * TRUST_FOR", "return self.sent_at + self.ttl * 1.0", ALL,
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
        "a participant that is gone is not noticed", "ftcoord.core.rendezvous",
        "if gone and (options.recall_on_loss or not running or not previous.ready):", "if False:", ROUNDS,
    ),
    Mutant(
        "a round's number is given again", "ftcoord.core.forming",
        "number = max([*known, previous.number, situation.highest]) + 1", "number = previous.number or 1", ROUNDS,
    ),
    Mutant(
        "the round is recalled whose record a decider knows, not the last one", "ftcoord.core.rendezvous",
        "    if previous.closed or number <= previous.number:\n        return _recall(previous, why, 0)",
        "    if True:\n        return _recall(previous, why, 0)", ("rounds",),
        plans=(LEFT_BEHIND_AND_THE_RECORD_IS_GONE,),
    ),
    Mutant(
        "nodes of an earlier round do not learn of a round that etcd lost", "ftcoord.core.rendezvous",
        "behind = [member for member in poll.busy if member.ask.seated < number]", "behind = list[RoundCandidate]()",
        RESTORES, plans=(LEFT_IN_AN_EARLIER_ROUND,),
    ),
    Mutant(
        "a node that is missing in a round that etcd lost is not missed", "ftcoord.core.rendezvous",
        "missing = mine.size - len(poll.busy) - len(poll.situation.unreadable)", "missing = 0", ROUNDS,
        plans=(A_HOST_DIES_AND_THE_RECORD_IS_GONE,),
    ),
    Mutant(
        "a new round forgets who is drained", "ftcoord.core.forming",
        "drained=_still_drained(previous.drained, situation.members),", "", ("rounds",),
    ),
    Mutant(
        "the last round's store stays open", "ftcoord.rendezvous.policy",
        "fences = [Span(round_key(self._prefix, before)) for before in over]", "fences = []", ROUNDS,
    ),
    Mutant(
        "a chunk of another round's roll is taken for this one's", "ftcoord.rendezvous.use",
        "if read is None or read[0] != record.roll:", "if read is None:", ROUNDS,
    ),
    Mutant(
        "a large round that vanished with its roll is not recalled", "ftcoord.rendezvous.rolls",
        "return None if head.ready and not head.closed else with_roll(head, (), ())", "return None",
        ("restores",), plans=(A_LARGE_ROUND_IS_LOST_WITH_ITS_ROLL,),
    ),
    Mutant(
        "a new decider without a record does not look for fences", "ftcoord.rendezvous.policy",
        "is_missed = view.missing_at != 0 and", "is_missed = view.vanished and", ("rounds",),
        plans=(BACK_UNDER_ANOTHER_LEASE_AND_THE_RECORD_IS_GONE,),
    ),
    Mutant(
        "nodes of another round with the number of a lost one are taken for its own", "ftcoord.core.rendezvous",
        "odd = _others_in(mine, poll) or", "odd =", ("restores",), plans=(TWO_ROUNDS_HAVE_ONE_NUMBER,),
    ),
    Mutant(
        "a round's store ends with the lease of a node", "ftcoord.rendezvous.handler",
        "lease=member.record_lease or None,", "lease=member.session.lease_id or None,", ROUNDS,
    ),
    Mutant(
        "newcomers go before participants of the last round", "ftcoord.core.forming",
        "ranked = _rank((back + new)[: poll.limits[1]], nodes_before)",
        "ranked = _rank((new + back)[: poll.limits[1]], nodes_before)", ROUNDS,
    ),
    Mutant(
        "ranks are not kept", "ftcoord.core.forming",
        "wanted = 0 if index == 0 else rank", "wanted = len(chosen) - 1 - index", ROUNDS,
    ),
    Mutant(
        "a worker that failed recalls nobody", "ftcoord.core.rendezvous",
        "if failing and options.recall_on_loss:", "if False:", ("rounds",),
    ),
    Mutant(
        "who lost its lease has no time to come back", "ftcoord.core.rendezvous",
        "return since + (whole if many else min(MOMENT, whole))", "return -inf", ("rounds",),
    ),
    Mutant(
        "a surplus node recalls the round", "ftcoord.core.rendezvous",
        "if new and len(previous.seats) - len(gone) < poll.limits[1]:", "if new:", ("rounds",),
    ),
    Mutant(
        "nodes with other limits count", "ftcoord.core.round_poll",
        "elif newest[ask.node] is member and ask.limits == limits:", "elif newest[ask.node] is member:", ("rounds",),
    ),
    Mutant(
        "other limits are waited for without end", "ftcoord.rendezvous.limits",
        "if moment > self._since + self._settings.lease_ttl * LEASES_OUTLIVED:", "if False:", ("rounds",),
    ),
    Mutant(
        "a node that the others left behind is not called back when they finish", "ftcoord.core.rendezvous",
        "is_done = now.outcome == FINISHED and is_same_round(now, mine)", "is_done = now.outcome == FINISHED", ENDS,
        plans=(THE_OTHERS_FINISH_WITHOUT_ONE,),
    ),
    Mutant(
        "a run that finished is started again", "ftcoord.core.rendezvous",
        'return restart == "always" or (restart == "failed" and closed.outcome == FAILED)', 'return restart != "never"',
        ENDS,
    ),
    Mutant(
        "a run is started again while its nodes still leave it", "ftcoord.core.rendezvous",
        "    if left:\n        return Wait(\n            f\"the run is closed, and",
        "    if False:\n        return Wait(\n            f\"the run is closed, and", ENDS,
    ),
    Mutant(
        "a node that the others went on without ends the run", "ftcoord.core.rendezvous",
        "if speaks and not now.closed else None", "if not now.closed else None", ENDS,
    ),
    Mutant(
        "the end of a round that went on from it still counts", "ftcoord.core.rendezvous",
        "return bool(closed.closed) and ask.reopens == closed.number < ask.seated", "return False", ("lost ends",),
        plans=(RESTORED_TO_AN_END_THAT_WAS_LEFT_BEHIND,),
    ),
    # -- quorums ------------------------------------------------------------------------------------------------------
    Mutant(
        "a quorum needs no majority", "ftcoord.core.quorum",
        "if count <= poll.alive // 2:", "if False:", QUORUMS,
    ),
    Mutant(
        "the join timeout is not awaited", "ftcoord.core.quorum",
        "if count != poll.alive and now < until:", "if False:", QUORUMS,
    ),
    Mutant(
        "shrink_only is ignored", "ftcoord.core.quorum",
        "if not (shrink_only and before) or name in before]", "if True]", QUORUMS,
    ),
    Mutant(
        "some of the last quorum make a fast one", "ftcoord.core.quorum",
        "if before and before <= poll.asking.keys():", "if before and before & poll.asking.keys():", QUORUMS,
    ),
    Mutant(
        "a quorum's id stays when its members change", "ftcoord.core.quorum",
        "if same and not any(seat.request.commit_failures > 0 for seat in seats):", "if True:", QUORUMS,
    ),
    Mutant(
        "a replica takes a quorum without it for its own", "ftcoord.core.quorum",
        "return _ANSWERED if replica_id in now.names and not now.contradicts(taken) else _MISSED", "return _ANSWERED",
        QUORUMS,
    ),
    Mutant(
        "a replica takes an id that stands for other replicas", "ftcoord.core.quorum",
        "if replica_id in now.names and not now.contradicts(taken)", "if replica_id in now.names", ("lost quorums",),
        plans=(AN_ID_STANDS_FOR_OTHERS,),
    ),
    Mutant(
        "a replica does not remember which quorums it heard of", "ftcoord.coordination.policy",
        "self.highest = self.highest.and_of(quorum)", "pass", ("lost quorums",),
    ),
    Mutant(
        "another member's answer is taken for one's own", "ftcoord.core.quorum",
        "if any(answered.get(member, 0) >= asked for member in me):",
        "if any(count >= asked for count in answered.values()):", QUORUMS,
    ),
    # -- votes --------------------------------------------------------------------------------------------------------
    Mutant(
        "one yes is enough", "ftcoord.core.vote",
        "return all(vote.yes for vote in cast)", "return any(vote.yes for vote in cast)", VOTES,
    ),
    Mutant(
        "two calls of one rank count as two ranks", "ftcoord.core.vote",
        "len({vote.rank for vote in cast}) < world_size", "len(cast) < world_size", VOTES,
    ),
    Mutant(
        "a vote counts though its rank has given up", "ftcoord.coordination.ranks",
        "return self._waiting.pop(future, None) is not None", "return self._waiting.get(future) is not None", VOTES,
    ),
    Mutant(
        "a rank whose vote has counted gets a timeout", "ftcoord.coordination.rank_group",
        "if not self.outcome.done() and self.leave():",
        "if not self.outcome.done() and (self.leave() or True):", VOTES,
    ),
    Mutant(
        "a vote waits beyond its timeout", "ftcoord.coordination.rank_group",
        "ended.wait(min(max(deadline - concurrency.now(), 0), concurrency.LONGEST_WAIT))",
        "ended.wait(concurrency.LONGEST_WAIT)", VOTES,
    ),
    Mutant(
        "a group asks without its last rank", "ftcoord.coordination.ranks",
        "is_last = len(self._there) >= self._world_size", "is_last = len(self._there) >= self._world_size - 1", VOTES,
    ),
    Mutant(
        "a group asks for a rank that has given up", "ftcoord.coordination.ranks",
        "if calls.pop(future, None) is not None and not calls:",
        "if calls.get(future) is not None and not calls:", VOTES,
    ),
    # -- timers -------------------------------------------------------------------------------------------------------
    Mutant(
        "a server does not look whether a worker still holds its timer", "ftcoord.timer.etcd_timer",
        "and holds(self._run.prefix, worker, request.timer)", "", TIMERS,
    ),
    Mutant(
        "a release is visible only in etcd", "ftcoord.timer.etcd_timer",
        "self._ledger.note(timer.slot, 0)", "pass", TIMERS,
    ),
    Mutant(
        "all timers of a slot have one token", "ftcoord.timer.etcd_timer",
        "token=secrets.randbits(62) + 1,", "token=1,", TIMERS,
    ),
    Mutant(
        "a timer is not recorded", "ftcoord.timer.etcd_timer",
        "self._key.put(encode(HeldTimers(self._worker, tuple(self._held.values()))))", "pass", TIMERS,
    ),
    Mutant(
        "a server counts by its wall clock when a timer is over", "ftcoord.timer.etcd_timer",
        "latest = self._clock() + deadline - concurrency.wall()", "latest = deadline", TIMERS,
    ),
)  # fmt: skip
