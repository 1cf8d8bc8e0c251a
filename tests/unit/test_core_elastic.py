"""Who of an elastic run gets which rank and whose state, and which samples; and states as they are sent. In memory."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.futures import Future

from ftcoord.core.elastic import TORN, Arrangement, Place, arranged, share, weight
from ftcoord.core.quorum_records import QuorumSeat
from ftcoord.elastic import MembersChanged, Sampler, State
from ftcoord.elastic.group import Group, set_current
from ftcoord.elastic.state import _bytes_of, _chunks, _filled, _hollowed, _packed, _tensor_of, _unpacked
from ftcoord.errors import ConfigError


def arrange(**places: Place) -> Arrangement:
    seats = [QuorumSeat(f"m-{name}", 1, place.request(name)) for name, place in sorted(places.items())]
    return arranged(7, seats)


# -- ranks and states -------------------------------------------------------------------------------------------------


def test_at_the_start_all_take_the_state_of_the_first_by_name() -> None:
    found = arrange(b=Place(0), a=Place(0), c=Place(0))
    assert (found.names, found.right, found.step, found.is_even) == (("a", "b", "c"), {0}, 0, False)


def test_survivors_keep_their_order_and_their_states_and_newcomers_follow() -> None:
    found = arrange(a=Place(20, 6, 3), b=Place(20, 6, 1), c=Place(20, 6, 2))
    assert (found.names, found.is_even) == (("b", "c", "a"), True)
    found = arrange(a=Place(20, 6, 3), b=Place(20, 6, 1), c=Place(0))
    assert (found.names, found.right, found.is_even) == (("b", "a", "c"), {0, 1}, False)


def test_rank_0_is_one_that_is_furthest_ahead() -> None:
    found = arrange(a=Place(20, 6, 0), b=Place(22, 6, 1), c=Place(20, 6, 2))
    assert (found.names, found.right, found.step) == (("b", "a", "c"), {0}, 11)


def test_the_same_step_of_another_group_is_another_state() -> None:
    found = arrange(a=Place(20, 5, 0), b=Place(20, 6, 1), c=Place(20, 6, 2))
    assert (found.names, found.right) == (("b", "c", "a"), {0, 1})


def test_who_has_stepped_and_not_committed_is_ahead_but_no_replica() -> None:
    found = arrange(a=Place(21, 6, 0), b=Place(21, 6, 1), c=Place(20, 6, 2))
    assert (found.names, found.right, found.step) == (("a", "b", "c"), {0}, 11)
    found = arrange(a=Place(21, 6, 0), b=Place(22, 6, 1))
    assert (found.names, found.right, found.step) == (("b", "a"), {0}, 11)


def test_who_is_torn_gives_its_state_to_nobody() -> None:
    found = arrange(a=Place(TORN, 6, 0), b=Place(0))
    assert (found.names, found.right, found.has_state) == (("b", "a"), {0}, True)
    assert not arrange(a=Place(TORN), b=Place(TORN)).has_state


def test_members_that_cannot_form_a_group_are_found() -> None:
    """Those that train stay; whoever differs from them has to leave."""
    found = arrange(a=Place(0, way="init"), b=Place(20, 6, 0, way="reconfigure"), c=Place(20, 6, 1, way="reconfigure"))
    assert found.odd == ("a",)
    assert arrange(a=Place(0, way="init"), b=Place(0, way="init")).odd == ()
    other = Place(0).request("a")
    for data in ("", "{}", '{"elastic": "init", "progress": true, "group": 0, "rank": 0}'):
        with pytest.raises(ValueError, match="no member of an elastic run"):
            Place.of(type(other)(**{**{name: getattr(other, name) for name in other.__slots__}, "data": data}))


# -- samples ----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 20))
def test_the_parts_of_all_ranks_cover_all_once_and_have_its_mean(start: int, size: int, world: int) -> None:
    parts = [share(start, start + size, rank, world) for rank in range(world)]
    assert [one for first, last in parts for one in range(first, last)] == [*range(start, start + size)]
    counts = [last - first for first, last in parts]
    assert max(counts) - min(counts) <= 1
    # The mean over ranks of weighted means is the mean over samples.
    means = [sum(range(first, last)) / max(last - first, 1) for first, last in parts]
    mean = sum(one * weight(start, start + size, rank, world) for rank, one in enumerate(means)) / world
    assert mean == pytest.approx(sum(range(start, start + size)) / size)


class _Process:
    """One member: its sampler, and the step that it has committed."""

    def __init__(self, length: int, batch: int) -> None:
        self.sampler = Sampler(length, batch, seed=3)
        self.step = 0


@pytest.mark.parametrize("seed", range(100))
def test_each_sample_is_used_by_one_committed_step_of_an_epoch(seed: int) -> None:
    """Whatever is lost or joins, and however far each was: the history of whoever is furthest ahead counts."""
    chance = Random(seed)
    length, batch = chance.randint(1, 40), chance.randint(1, 15)
    used: dict[int, list[int]] = {}  # by step: what the last group that made it has used
    members = [_Process(length, batch) for _ in range(chance.randint(1, 4))]
    steps = 2 * len(members[0].sampler)
    while (ahead := max(members, key=lambda one: one.step)).step < steps:
        for rank, one in enumerate(members):  # what take_place does
            one.sampler.load_state_dict(ahead.sampler.state_dict())
            one.step, one.sampler.rank, one.sampler.world = ahead.step, rank, len(members)
        parts = []
        for one in members:
            indices = next(one.sampler.batches())
            assert indices, "each rank has something to do"
            parts += indices if one.sampler.weight else []
        for one in members:
            if chance.random() < 0.8:
                one.step += 1
                one.sampler.advance()
                used[one.step] = parts
        members = [one for one in members if chance.random() < 0.8] or members[:1]
        if chance.random() < 0.3:
            members.append(_Process(length, batch))
    epochs = [[one for step in range(first, first + steps // 2) for one in used[step]] for first in (1, 1 + steps // 2)]
    for epoch in epochs:
        assert Counter(epoch) == Counter(range(length))


def test_orders_differ_by_epoch_and_go_on_where_they_were() -> None:
    sampler, again = Sampler(30, 7), Sampler([*range(30)], 7)
    first = [*sampler.batches()]
    assert [len(one) for one in first] == [7, 7, 7, 7, 2]
    for _ in range(3):
        again.advance()
    assert [*again] == first[3:]
    assert len(again) == 2
    for _ in range(2):
        again.advance()
    assert again.state_dict() == {"epoch": 1, "position": 0}
    assert [*again] != first
    assert [*Sampler(5, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("length", "batch"), [(0, 1), (5, 0)])
def test_a_sampler_without_samples_is_refused(length: int, batch: int) -> None:
    with pytest.raises(ConfigError):
        Sampler(length, batch)


# -- states -----------------------------------------------------------------------------------------------------------


def a_group(world: int = 1) -> Group:
    return Group(arrange(**{f"p{one}": Place(0) for one in range(world)}), 0, torch.device("cpu"))


def trained(**more: Any) -> State:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return State(model=model, optimizer=torch.optim.AdamW(model.parameters()), sampler=Sampler(9, 3), **more)


def step_of(state: State) -> None:
    state.model(torch.randn(5, 3)).sum().backward()
    state.optimizer.step()


def test_what_is_sent_arrives_as_it_was() -> None:
    state = trained(odd=[torch.tensor(True), {"x": (1, 2.5, None)}, torch.ones(2, 3, dtype=torch.bfloat16).t()])
    step_of(state)
    tree = {"parts": {name: getattr(state, name).state_dict() for name in ("model", "optimizer")}, "odd": state.odd}
    tensors: list[torch.Tensor] = []
    form = _unpacked(_packed(_hollowed(tree, tensors)))
    likes: list[torch.Tensor] = []
    _hollowed(form, likes)
    data = torch.cat([_bytes_of(one) for chunk in _chunks(tensors) for one in chunk])
    pieces = data.split([one.numel() * one.element_size() for one in likes])
    found = _filled(form, iter([_tensor_of(piece, like) for piece, like in zip(pieces, likes, strict=True)]))
    assert found["odd"][1] == {"x": (1, 2.5, None)}
    other = trained()
    other.model.load_state_dict(found["parts"]["model"])
    other.optimizer.load_state_dict(found["parts"]["optimizer"])
    torch.testing.assert_close(other.optimizer.state_dict(), state.optimizer.state_dict())
    torch.testing.assert_close(other.model.state_dict(), state.model.state_dict())
    torch.testing.assert_close(found["odd"][2], state.odd[2])


def test_large_tensors_are_sent_alone() -> None:
    sizes = [10, 1 << 23, 1 << 23, 1 << 25, 3]
    chunks = _chunks([torch.empty(size, dtype=torch.uint8) for size in sizes])
    assert [[one.numel() for one in chunk] for chunk in chunks] == [[10, 1 << 23], [1 << 23], [1 << 25], [3]]


def test_a_step_that_is_given_up_changes_neither_values_nor_buffers() -> None:
    state = trained(best=1.0)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    state.best = 0.5
    state.model(torch.randn(5, 3)).sum().backward()
    state.give_up_step()
    assert state.best == 1.0
    assert state.model[0].weight.grad is None
    torch.testing.assert_close(state.model.state_dict(), before)
    assert state.progress == 0


def test_progress_counts_steps_of_optimizers_until_the_commit() -> None:
    state = trained()
    step_of(state)
    assert state.progress == 1
    set_current(a_group())
    try:
        state.commit()
    finally:
        set_current(None)
    assert (state.progress, state.step, state.sampler.position) == (2, 1, 3)
    step_of(state)
    step_of(state)
    assert state.progress == TORN
    two = State(one=torch.optim.SGD([nn.Parameter(torch.ones(1))]), two=torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    two.one.step()
    assert two.progress == TORN
    two.two.step()
    assert two.progress == 1


def test_a_step_that_nobody_committed_counts_if_all_optimizers_have_stepped() -> None:
    state = trained()
    step_of(state)
    place = Place(state.progress)
    state.take_place(Group(arrange(a=place), 0, torch.device("cpu")))
    assert (state.step, state.progress, state.sampler.position) == (1, 2, 3)


def test_what_cannot_be_shared_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"odd='object'.*state_dict"):
        State(odd=object())

    class FSDPModule(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"model='FSDPModule'.*lost rank's shard"):
        State(model=nn.Sequential(FSDPModule()))
    with pytest.raises(ConfigError, match="wrap it by"):
        State(model=nn.DataParallel(nn.Linear(1, 1)))
    state = trained(best=1.0)
    with pytest.raises(AttributeError, match="give it to State"):
        state.other = 1
    with pytest.raises(AttributeError, match="give it to State"):
        _ = state.other


# -- waits ------------------------------------------------------------------------------------------------------------


class _Work:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future

    def wait(self) -> None:
        self.future.wait()


def test_a_wait_ends_with_the_work_or_with_the_group() -> None:
    group, work = a_group(2), _Work()
    promise = group.promise(work, 5)  # type: ignore[arg-type]
    work.future.set_result(None)
    assert promise.wait() == 5
    waiting = _Work()
    timer = threading.Timer(0.05, group.end, ["p1 is lost"])
    timer.start()
    with pytest.raises(MembersChanged, match="p1 is lost"):
        group.wait(waiting)  # type: ignore[arg-type]
    waiting.future.set_result(None)  # too late: no error, and no effect
    with pytest.raises(MembersChanged, match="p1 is lost"):
        group.wait(_Work())  # type: ignore[arg-type]
    assert group.is_known
    assert group.left.is_set()


def test_a_collective_that_fails_ends_the_group() -> None:
    group, work = a_group(2), _Work()
    promise = group.promise(work, 5)  # type: ignore[arg-type]
    error = RuntimeError("Connection closed by peer" + "!" * 1000)
    work.future.set_exception(error)
    with pytest.raises(MembersChanged, match="a collective failed: Connection closed"):
        promise.wait()
    assert (group.is_known, group.failure) == (False, error)
    assert len(group.over) < 200


def test_a_newcomer_is_let_in_at_a_commit_once_others_may_have_come_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("ftcoord.concurrency.now", lambda: now[0])
    group = a_group()
    group.let_in()
    group.note_newcomer("x")
    group.let_in()
    assert not group.over
    now[0] += 1
    group.note_newcomer("")
    group.let_in()
    assert not group.over
    group.note_newcomer("y")
    now[0] += 1
    group.note_newcomer("y")
    group.let_in()
    assert group.over == "y joins"
