"""Asks over connections: every order of events in small worlds, planted faults that it finds, and the wire."""

from __future__ import annotations

import pytest
from asking import REQUEST, search
from invariants import InvariantBroken

from ftcoord.core.asks import (
    BY_KEY_AFTER,
    CATCHES_UP,
    TRIES_EVERY,
    TRIES_LATER,
    Ask,
    AskBook,
    Asker,
    Connect,
    Place,
    Via,
    Withdrawal,
    encode_message,
    parse_ask,
    parse_withdrawal,
)
from ftcoord.errors import StateError

ALL = 1000
PLACE, OTHER = Place("h:1", "00"), Place("h:2", "11")


@pytest.mark.parametrize(
    ("members", "faults", "depth"),
    [
        (2, {"breaks": 1}, ALL),
        (2, {"terms": 1}, ALL),
        (2, {"breaks": 2}, 10),
        (2, {"breaks": 1, "give_ups": 1}, ALL),
        (2, {"give_ups": 1, "asks": 2}, 11),
        (2, {"breaks": 1, "terms": 1}, 9),
        (2, {"breaks": 1, "give_ups": 1, "asks": 2}, 11),
        (2, {"leases": 1, "breaks": 1}, 9),
        (2, {"leases": 1, "terms": 1}, 9),
        (3, {"breaks": 1}, 8),
        (3, {"terms": 1}, 7),
    ],
)
def test_every_order_of_events(members: int, faults: dict[str, int], depth: int) -> None:
    assert search(depth, members, **faults) > 500


# -- the test of the tests: each of these faults is found --------------------------------------------------------------


def an_older_connection_wins(book: AskBook, ask: Ask, via: Via, now: float, seen_at: int) -> bool:
    held = book._held.get(ask.member)
    if held is not None:
        held.via = Via(via.process, 0)
    return TAKE(book, ask, via, now, seen_at)


def answered_asks_are_not_looked_up(book: AskBook, ask: Ask, via: Via, now: float, seen_at: int) -> bool:
    answered, book._answered = book._answered, {}
    try:
        return TAKE(book, ask, via, now, seen_at)
    finally:
        book._answered = answered


def a_withdrawal_is_dropped(book: AskBook, one: Withdrawal) -> None:
    pass


def an_end_withdraws_all_of_its_process(book: AskBook, via: Via) -> None:
    for held in book._held.values():
        held.is_open &= held.via.process != via.process


def what_a_new_connection_must_ask_is_forgotten(asker: Asker, number: int, now: float) -> list[Ask] | None:
    return None if PROVED(asker, number, now) is None else []


TAKE, PROVED = AskBook.take, Asker.proved


@pytest.mark.parametrize(
    ("name", "fault", "faults", "found"),
    [
        ("take", an_older_connection_wins, {"breaks": 1}, "wait for ever"),
        ("take", answered_asks_are_not_looked_up, {"terms": 1}, "two decisions answer"),
        ("withdraw", a_withdrawal_is_dropped, {"give_ups": 1}, "was withdrawn"),
        ("end", an_end_withdraws_all_of_its_process, {"breaks": 1}, "wait for ever"),
    ],
)
def test_a_fault_of_the_decider_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: object, faults: dict[str, int], found: str
) -> None:
    monkeypatch.setattr(AskBook, name, fault)
    with pytest.raises(InvariantBroken, match=found):
        search(12, 2, **faults)


def test_a_fault_of_the_asker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asker, "proved", what_a_new_connection_must_ask_is_forgotten)
    with pytest.raises(InvariantBroken, match="wait for ever"):
        search(12, 2)


# -- when an asker does what -------------------------------------------------------------------------------------------


def ask(member: str = "m", serial: int = 1) -> Ask:
    return Ask(member, 5, serial, 0, 0, REQUEST)


def asking(now: float = 0.0) -> Asker:
    """One that has just asked, and knows who decides."""
    asker = Asker[str](patience=6.0)
    assert asker.decides_at(PLACE, now) == []
    assert not asker.begin("a", ask(), now)
    assert asker.next(now) == Connect(PLACE, 1)
    return asker


def test_after_a_second_without_a_connection_it_asks_by_key_and_tries_again_after_ten() -> None:
    asker = asking()
    asker.lost(1, 0.0)
    assert asker.next(0.0) == TRIES_EVERY
    assert asker.next(TRIES_EVERY) == Connect(PLACE, 2)
    asker.lost(2, 0.9)
    assert asker.next(0.95) == 1.0
    assert asker.next(BY_KEY_AFTER) == ["a"]
    assert asker.is_by_key
    assert asker.next(1.0) == Connect(PLACE, 3)
    asker.lost(3, 1.0)
    assert asker.next(1.0) == 1.0 + TRIES_LATER
    assert asker.next(11.0) == Connect(PLACE, 4)
    assert asker.proved(4, 11.0) == []
    assert not asker.is_by_key


def test_another_decider_is_asked_at_once() -> None:
    asker = asking()
    asker.lost(1, 0.0)
    assert asker.next(1.0) == ["a"]
    asker.decides_at(OTHER, 2.0)
    asker.begin("a", ask(), 2.0)
    assert asker.next(2.0) == Connect(OTHER, 2)
    assert asker.proved(2, 2.5) == [ask()]


def test_while_there_is_no_decider_nobody_asks_by_key() -> None:
    asker = asking()
    assert asker.decides_at(None, 0.5) == []
    assert asker.next(100.0) == float("inf")
    assert asker.decides_at(OTHER, 100.0) == []
    assert asker.next(100.0) == Connect(OTHER, 2)


def test_a_decider_without_a_port_is_asked_by_key_at_once() -> None:
    asker = asking()
    assert asker.decides_at(Place("", "22"), 0.5) == ["a"]
    assert asker.next(0.5) == float("inf")


def test_a_connection_that_is_made_too_late_is_of_no_use() -> None:
    asker = asking()
    asker.decides_at(OTHER, 0.1)
    assert asker.proved(1, 0.2) is None
    asker.lost(1, 0.2)
    assert asker.next(0.2) == Connect(OTHER, 2)


def test_an_open_connection_that_is_silent_is_given_up_when_the_office_outlives_that() -> None:
    asker = asking()
    assert asker.proved(1, 0.0) == [ask()]
    assert not asker.is_silent(5.9)
    asker.came(5.0)
    assert not asker.is_silent(10.9)
    assert asker.is_silent(11.0)
    assert asker.answered(lambda one: True) == ["a"]
    assert not asker.is_silent(1000.0)


def test_who_goes_withdraws_what_the_decider_may_have() -> None:
    asker = asking()
    assert asker.end("a") is None
    asker.begin("a", ask(), 0.0)
    asker.proved(1, 0.0)
    assert asker.end("a") == ask()


# -- the decider's book ------------------------------------------------------------------------------------------------

VIA = Via("p", 1)


def test_an_ask_that_is_ahead_of_the_decider_is_kept_and_one_of_a_member_that_is_gone_is_told() -> None:
    book = AskBook()
    assert not book.take(ask(), VIA, 0.0, 4)
    assert book.lose([], 4) == []
    assert book.counting([]) == {}
    assert book.catches_up(4) == CATCHES_UP
    assert book.catches_up(5) < 0
    assert [one.ask for one in book.counting(["m"]).values()] == [ask()]
    assert [one.ask for one in book.lose([], 5)] == [ask()]
    assert book.waiting() == []


def test_an_ask_that_comes_again_is_as_old_as_it_was_and_not_hidden_any_more() -> None:
    book = AskBook()
    book.take(ask("n"), VIA, 0.0, 4)
    book.take(ask(), VIA, 1.0, 4)
    book.take(ask("n"), VIA, 2.0, 9)
    one = book.counting(["n"])["n"]
    assert (one.first_at, one.order, one.first_seen_at, one.seen_at) == (0.0, 1, 4, 9)


def test_a_decision_is_told_once_for_each_connection() -> None:
    book = AskBook()
    for at, name in enumerate("abc"):
        book.take(ask(name), Via("p", 1 + at // 2), 0.0, 4)
    assert set(book.answer({"a": 1, "b": 1, "c": 1})) == {Via("p", 1), Via("p", 2)}
    assert book.answer({"a": 1, "b": 1, "c": 1}) == []
    assert book.take(ask("a"), Via("p", 3), 0.0, 4)


# -- on the wire -------------------------------------------------------------------------------------------------------


def test_messages_are_read_as_they_were_written() -> None:
    assert parse_ask(encode_message(ask())) == ask()
    assert parse_withdrawal(encode_message(Withdrawal("m", 3))) == Withdrawal("m", 3)


@pytest.mark.parametrize(
    "payload",
    [b"", b"{}", b"[]", b"\xff", encode_message(Withdrawal("m", 1)), encode_message(ask()).replace(b"5", b"-5")],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(StateError):
        parse_ask(payload)
