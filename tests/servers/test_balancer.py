from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.errors import ConfigError
from agent_loop.servers.balancer import LoadBalancer


def test_sessions_one_after_another_spread_evenly_over_idle_servers() -> None:
    balancer = LoadBalancer(4)
    chosen = []
    for session in range(200):
        with balancer.lease(str(session)) as server:
            chosen.append(server)
    assert [chosen.count(server) for server in range(4)] == [50, 50, 50, 50]


def test_a_new_session_goes_to_the_server_with_the_least_in_flight() -> None:
    balancer = LoadBalancer(3)
    with balancer.lease("a") as first, balancer.lease("b") as second, balancer.lease("c") as third:
        assert sorted([first, second, third]) == [0, 1, 2]
        with balancer.lease("a"), balancer.lease("b"), balancer.lease("d") as fourth:
            assert fourth == third


def test_a_session_stays_where_it_began() -> None:
    balancer = LoadBalancer(2)
    with balancer.lease("a") as first:
        pass
    with balancer.lease("b"), balancer.lease("a") as again:
        assert again == first


def test_an_ended_session_may_begin_elsewhere() -> None:
    balancer = LoadBalancer(2)
    with balancer.lease("a") as first:
        pass
    assert balancer.end_session("a") == first
    with balancer.lease("a") as again:
        assert again != first


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_counts_return_to_zero_whatever_happens(steps: list[tuple[int, bool]]) -> None:
    balancer = LoadBalancer(3)
    with ExitStack() as leases:
        for session, fails in steps:
            if fails:
                with pytest.raises(ZeroDivisionError), balancer.lease(str(session)):
                    raise ZeroDivisionError
            else:
                leases.enter_context(balancer.lease(str(session)))
        assert balancer.num_leases == sum(not fails for _, fails in steps)
    assert balancer.num_leases == 0
    for session in range(6):
        balancer.end_session(str(session))
    assert balancer.num_sessions == 0


def test_no_server_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        LoadBalancer(0)
