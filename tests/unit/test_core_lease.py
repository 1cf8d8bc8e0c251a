"""The arithmetic of a lease: renewed in good time, and never trusted for longer than etcd keeps it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ftcoord.core.lease import RENEW_AFTER, RETRY_BETWEEN, TRUST_FOR, LeaseTimes, SessionState

SHORTEST, LONGEST = RETRY_BETWEEN
SMALLEST_TTL = 2
"""The least that an etcd of default settings grants."""

ROUNDING = 1e-6

# Whole and half seconds: most sums of these are exact.
leases = st.builds(LeaseTimes, st.integers(0, 2**30).map(float), st.integers(SMALLEST_TTL, 3600).map(float))
delays = st.integers(0, 2**14).map(lambda halves: halves / 2)


def test_a_lease_of_nine_seconds() -> None:
    times = LeaseTimes(sent_at=100.0, ttl=9.0)
    assert times.renew_at() == 103.0
    assert times.trusted_until == 106.0
    assert times.state(105.9) is SessionState.CONNECTED
    assert times.state(106.0) is SessionState.SUSPENDED


def test_a_renewal_and_a_retry_fit_into_the_trust() -> None:
    assert 0 < RENEW_AFTER < TRUST_FOR < 1
    assert (TRUST_FOR - RENEW_AFTER) * SMALLEST_TTL > 2 * SHORTEST


@given(leases)
def test_it_is_renewed_before_trust_ends_and_trust_ends_before_the_lease(times: LeaseTimes) -> None:
    assert times.sent_at < times.renew_at() < times.trusted_until < times.sent_at + times.ttl


@given(leases, delays)
def test_it_is_trusted_until_then_and_no_longer(times: LeaseTimes, later: float) -> None:
    connected = times.state(times.sent_at + later) is SessionState.CONNECTED
    assert connected == (times.sent_at + later < times.trusted_until)
    assert not connected or later < times.ttl


@given(leases, delays)
def test_retries_keep_their_distance_in_an_outage_of_any_length(times: LeaseTimes, outage: float) -> None:
    tried_at = times.sent_at + outage
    assert SHORTEST - ROUNDING <= times.renew_at(tried_at) - tried_at <= LONGEST + ROUNDING


@given(leases, st.floats(0, 1))
def test_a_retry_comes_before_trust_ends_while_there_is_time(times: LeaseTimes, part: float) -> None:
    tried_at = times.sent_at + part * times.ttl * TRUST_FOR
    if times.trusted_until - tried_at > 2 * SHORTEST:
        assert times.renew_at(tried_at) < times.trusted_until


@given(leases, delays)
def test_a_renewal_is_given_up_with_the_trust_while_there_is_some(times: LeaseTimes, later: float) -> None:
    now = times.sent_at + later
    if times.trusted_until - now > SHORTEST:
        assert now + times.renewal_timeout(now) == pytest.approx(times.trusted_until)
    else:
        assert times.renewal_timeout(now) == times.ttl * RENEW_AFTER
