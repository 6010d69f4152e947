"""Tests of the balancer and its policy, without servers, clocks or tasks."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_loop.errors import ConfigError
from agent_loop.servers.balancer import BalancerConfig, LoadBalancer, SlotGrant, SlotRequest
from tests.harness import examples

ids = count()


def servers(number: int) -> list[str]:
    return [f"s{i}" for i in range(number)]


def balancer_of(number: int, *, max_in_flight: int | None = None, **config: float | bool) -> LoadBalancer:
    balancer = LoadBalancer(config=BalancerConfig(**config))  # pyright: ignore[reportArgumentType]
    for server in servers(number):
        balancer.add_server(server, max_in_flight=max_in_flight)
    return balancer


def ask(balancer: LoadBalancer, session: str, **request: object) -> SlotGrant | None:
    return balancer.acquire(SlotRequest(f"r{next(ids)}", session, **request))  # pyright: ignore[reportArgumentType]


def held(balancer: LoadBalancer, session: str, **request: object) -> SlotGrant:
    """Request a slot that must be granted at once."""
    grant = ask(balancer, session, **request)
    assert grant is not None
    return grant


def served(balancer: LoadBalancer, session: str) -> str:
    """Run one request of a session and return its server."""
    grant = held(balancer, session)
    balancer.release(grant.request.id, num_new_tokens=1)
    return grant.server


# -- choice of a server ------------------------------------------------------------------------------------------------


def test_consecutive_sessions_spread_evenly_over_idle_servers() -> None:
    balancer = LoadBalancer(servers(4))
    chosen = [served(balancer, str(session)) for session in range(200)]
    assert [chosen.count(server) for server in servers(4)] == [50, 50, 50, 50]


def test_servers_are_compared_by_expected_work_and_not_by_requests() -> None:
    balancer = balancer_of(2)
    long = held(balancer, "long", max_tokens=200)
    short = [held(balancer, f"short{i}", max_tokens=10).server for i in range(12)]
    assert short.count(long.server) == 0


def test_uncached_prompt_tokens_add_work() -> None:
    balancer = balancer_of(2, prefill_cost=0.1)
    lease = held(balancer, "a", num_prompt_tokens=1000, max_tokens=50)
    assert lease.work == 150
    balancer.release(lease.request.id, num_new_tokens=50)
    again = held(balancer, "a", num_prompt_tokens=1100, max_tokens=50)
    assert again.server == lease.server
    assert again.work == pytest.approx(50 + 0.1 * 50)


def test_the_escape_margin_is_smaller_for_servers_with_few_slots() -> None:
    small, large = (balancer_of(2, max_in_flight=limit, prefill_cost=0.0) for limit in (8, 64))
    for balancer in (small, large):
        lease = held(balancer, "a")
        balancer.release(lease.request.id, num_new_tokens=256)
        while balancer.in_flight[lease.server] < 4:
            held(balancer, f"b{next(ids)}")
        for other in [x for x in list(balancer._leases.values()) if x.server != lease.server]:
            balancer.release(other.request.id)
        assert (held(balancer, "a").server == lease.server) == (balancer is large)


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_moves_when_the_imbalance_costs_more_than_its_prefix() -> None:
    balancer = balancer_of(2, expected_tokens=100, escape_margin=2, prefill_cost=0.1)
    server_of: dict[str, str] = {}
    for session, length in [("a", 1000), *((f"b{i}", 10_000) for i in range(40))]:
        lease = held(balancer, session, num_prompt_tokens=length)
        balancer.release(lease.request.id, num_new_tokens=100)
        server_of[session] = lease.server
    home = server_of["a"]
    neighbours = [session for session in server_of if server_of[session] == home and session != "a"]
    for number, session in enumerate(neighbours):
        gap = 100 * number  # each completion is expected to take 100 tokens
        lease = held(balancer, "a", num_prompt_tokens=1100)
        balancer.release(lease.request.id)
        assert (lease.server == home) == (gap <= 2 * 100 + 0.1 * 1100)
        if lease.server != home:
            assert (lease.moved_from, balancer.server_of("a")) == (home, lease.server)
            return
        assert held(balancer, session, num_prompt_tokens=10_100).server == home
    pytest.fail("the session never moved")


def test_the_work_stays_balanced_under_skewed_turn_counts() -> None:
    """A few sessions have 40 turns and most have up to 3; each server has about 60 sessions at a time."""
    random, balancer = Random(3), LoadBalancer(servers(4))
    running: list[tuple[SlotGrant, int]] = []
    sessions, worst = count(), 0.0
    for step in range(12_000):
        while len(running) < 240:
            turns = 40 if random.random() < 0.1 else random.randint(1, 3)
            running.append((held(balancer, str(next(sessions)), num_prompt_tokens=300), turns))
        lease, turns = running.pop(random.randrange(len(running)))
        new_tokens = random.randint(20, 400)
        balancer.release(lease.request.id, num_new_tokens=new_tokens)
        if turns > 1:
            context = lease.request.num_prompt_tokens + new_tokens + 80
            running.append((held(balancer, lease.request.session, num_prompt_tokens=context), turns - 1))
        else:
            balancer.end_session(lease.request.session)
        if step > 1000:
            work = list(balancer.outstanding_work.values())
            worst = max(worst, max(work) / (sum(work) / len(work)))
    assert worst < 1.15


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_queued_requests_get_free_slots_in_order_of_arrival() -> None:
    balancer = balancer_of(2, max_in_flight=1)
    first, second = held(balancer, "a"), held(balancer, "b")
    assert [ask(balancer, f"c{i}") for i in range(3)] == [None] * 3
    (lease,) = balancer.release(second.request.id)
    assert (lease.request.session, lease.server) == ("c0", second.server)
    (lease,) = balancer.release(first.request.id)
    assert (lease.request.session, lease.server) == ("c1", first.server)


def test_a_request_stays_queued_for_its_own_server_while_that_is_cheaper() -> None:
    balancer = balancer_of(2, max_in_flight=1, prefill_cost=1.0)
    first = held(balancer, "a", num_prompt_tokens=100_000)
    other = held(balancer, "b")
    balancer.release(first.request.id, num_new_tokens=5)
    taken = held(balancer, "c")
    assert taken.server == first.server
    assert ask(balancer, "a", num_prompt_tokens=100_100) is None
    assert balancer.release(other.request.id) == []
    (lease,) = balancer.release(taken.request.id)
    assert (lease.request.session, lease.server) == ("a", first.server)


def test_a_request_queued_for_a_removed_server_goes_to_another_one() -> None:
    balancer = balancer_of(2, max_in_flight=1, prefill_cost=1.0)
    first = held(balancer, "a", num_prompt_tokens=100_000)
    balancer.release(first.request.id, num_new_tokens=5)
    while balancer.in_flight[first.server] == 0:
        held(balancer, f"c{next(ids)}")
    assert ask(balancer, "a", num_prompt_tokens=100_100) is None
    balancer.remove_server(first.server)
    granted = balancer.grant_free_slots() or [
        lease for running in list(balancer._leases.values()) for lease in balancer.release(running.request.id)
    ]
    assert [lease.request.session for lease in granted] == ["a"]


class BalancerStateMachine(RuleBasedStateMachine):
    """Requests, failures and membership changes in any order.

    Counts must be consistent, and no unassigned request may be queued while a slot is free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.balancer = LoadBalancer(config=BalancerConfig(escape_margin=1.0))
        self.balancer.add_server("s0", max_in_flight=2)
        self.held: dict[str, SlotGrant] = {}
        self.queued: set[str] = set()

    def record(self, grants: list[SlotGrant]) -> None:
        for grant in grants:
            self.queued.remove(grant.request.id)
            self.held[grant.request.id] = grant

    @rule(session=st.integers(0, 19), length=st.integers(1, 5000))
    def acquire(self, session: int, length: int) -> None:
        request = SlotRequest(f"r{next(ids)}", f"session-{session}", length)
        if not self.balancer.servers:
            return
        self.queued.add(request.id)
        grant = self.balancer.acquire(request)
        self.record([] if grant is None else [grant])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), new=st.none() | st.integers(0, 900))
    def release(self, data: st.DataObject, new: int | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[request_id]
        self.record(self.balancer.release(request_id, num_new_tokens=new))

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def release_queued(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.queued)))
        self.queued.remove(request_id)
        assert self.balancer.release(request_id) == []

    @rule(name=st.sampled_from(["s0", "s1", "s2"]), num_slots=st.integers(1, 3))
    def add_or_remove_server(self, name: str, num_slots: int) -> None:
        if name not in self.balancer.servers:
            self.record(self.balancer.add_server(name, max_in_flight=num_slots))
            return
        self.balancer.remove_server(name)
        self.held = {key: lease for key, lease in self.held.items() if lease.server != name}
        self.record(self.balancer.grant_free_slots())

    @rule(session=st.integers(0, 19))
    def end_session(self, session: int) -> None:
        name = f"session-{session}"
        if not any(request.session == name for request, _ in self.balancer._queued.values()) and not any(
            lease.request.session == name for lease in self.held.values()
        ):
            self.balancer.end_session(name)

    @invariant()
    def counts_are_consistent(self) -> None:
        assert self.balancer.num_leases == len(self.held)
        assert self.balancer.num_queued == len(self.queued)
        for server, number in self.balancer.in_flight.items():
            assert number == sum(lease.server == server for lease in self.held.values())
            work = sum(lease.work for lease in self.held.values() if lease.server == server)
            assert self.balancer.outstanding_work[server] == pytest.approx(work)

    @invariant()
    def no_unassigned_request_is_queued_while_a_slot_is_free(self) -> None:
        if any(server.has_free_slot for server in self.balancer._servers.values()):
            assert all(session.server is not None for _, session in self.balancer._queued.values())


TestBalancerStateMachine = BalancerStateMachine.TestCase
TestBalancerStateMachine.settings = examples(60, stateful_step_count=40)


def test_a_new_server_does_not_move_sessions_and_an_ended_session_may_move() -> None:
    balancer = LoadBalancer(servers(3))
    homes = {str(i): held(balancer, str(i)).server for i in range(30)}
    balancer.add_server("new")
    assert {session: balancer.server_of(session) for session in homes} == homes
    balancer.end_session("0")
    assert held(balancer, "0").server == "new"
    with pytest.raises(ConfigError, match="two servers with the name 's0'"):
        LoadBalancer(["s0", "s0"])
