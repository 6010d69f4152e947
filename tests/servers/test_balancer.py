"""Tests of the balancer and its policy, without servers, clocks or tasks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent_loop.errors import ConfigError
from agent_loop.servers.balancer import BalancerConfig, LoadBalancer, SlotGrant, SlotRequest
from agent_loop.servers.priority_queue import IndexedPriorityQueue
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


# -- choice of a server ------------------------------------------------------------------------------------------------


def test_consecutive_sessions_spread_evenly_over_idle_servers() -> None:
    balancer = LoadBalancer(servers(4))
    chosen = []
    for session in range(200):
        with balancer.lease(str(session)) as server:
            chosen.append(server)
    assert [chosen.count(server) for server in servers(4)] == [50, 50, 50, 50]


def test_concurrent_sessions_spread_evenly() -> None:
    balancer = LoadBalancer(servers(4))
    chosen = [held(balancer, str(session)).server for session in range(200)]
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


def test_a_server_with_a_higher_configured_speed_gets_more_requests() -> None:
    balancer = LoadBalancer()
    balancer.add_server("fast", speed=3.0)
    balancer.add_server("slow")
    chosen = [held(balancer, str(i)).server for i in range(40)]
    assert chosen.count("fast") == 30


def test_a_server_with_slow_completions_gets_fewer_requests() -> None:
    balancer = LoadBalancer(servers(4))
    seconds = {server: 2.0 if server == "s0" else 1.0 for server in servers(4)}
    for _ in range(60):
        grants = [held(balancer, f"a{next(ids)}") for _ in range(12)]
        for lease in grants:
            balancer.release(lease.request.id, num_new_tokens=100, seconds=seconds[lease.server])
            balancer.end_session(lease.request.session)
    homes = [held(balancer, f"b{number}").server for number in range(40)]
    assert homes.count("s0") < 5
    assert all(homes.count(server) > 10 for server in ("s1", "s2", "s3"))


def test_noise_in_durations_does_not_unbalance_equal_servers() -> None:
    random, balancer = Random(1), LoadBalancer(servers(4))
    for _ in range(300):
        lease = held(balancer, f"a{next(ids)}")
        balancer.release(lease.request.id, num_new_tokens=100, seconds=random.uniform(0.9, 1.1))
        balancer.end_session(lease.request.session)
    homes = [held(balancer, f"b{number}").server for number in range(40)]
    assert [homes.count(server) for server in servers(4)] == [10] * 4


def shares(balancer: LoadBalancer, num_requests: int, seconds: Callable[[str, int], float]) -> list[int]:
    """Run requests one at a time and return the number of requests of each server.

    Args:
        seconds: Returns the duration of a completion from the server's name and its number of earlier requests.
    """
    counts = dict.fromkeys(servers(4), 0)
    for _ in range(num_requests):
        lease = held(balancer, f"a{next(ids)}")
        took_s = seconds(lease.server, counts[lease.server])
        counts[lease.server] += 1
        balancer.release(lease.request.id, num_new_tokens=10, seconds=took_s)
        balancer.end_session(lease.request.session)
    return list(counts.values())


@pytest.mark.parametrize("factor", [3.0, 30.0, 1000.0])
def test_one_slow_first_completion_does_not_lower_the_share_of_a_server(factor: float) -> None:
    for slow in servers(4):
        given = shares(
            LoadBalancer(servers(4)),
            400,
            lambda server, n, slow=slow: factor if (server, n) == (slow, 0) else 1.0,
        )
        assert min(given) >= 95


@pytest.mark.parametrize("seed", range(3))
def test_completions_under_a_millisecond_are_ignored(seed: int) -> None:
    random = Random(seed)
    given = shares(LoadBalancer(servers(4)), 400, lambda *_: 9e-4 * random.random() ** 4)
    assert given == [100] * 4


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_a_slow_server_is_measured_again_from_time_to_time(factor: float) -> None:
    given = shares(LoadBalancer(servers(4)), 2000, lambda server, _: factor if server == "s0" else 1.0)
    assert 2000 / 4 / 32 < given[0] < 2000 / 4 / 8
    assert max(given[1:]) - min(given[1:]) < 10


def test_a_server_that_becomes_fast_again_regains_its_share() -> None:
    balancer = LoadBalancer(servers(4))
    given = shares(balancer, 400, lambda server, _: 10.0 if server == "s0" else 1.0)
    assert given[0] < 25
    shares(balancer, 400, lambda *_: 1.0)
    assert shares(balancer, 400, lambda *_: 1.0) == [100] * 4


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


def test_a_session_stays_on_its_first_server() -> None:
    balancer = LoadBalancer(servers(2))
    with balancer.lease("a") as first:
        pass
    with balancer.lease("b"), balancer.lease("a") as again:
        assert again == first


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


def test_an_ended_session_may_begin_on_another_server() -> None:
    balancer = LoadBalancer(servers(2))
    with balancer.lease("a") as first:
        pass
    assert balancer.end_session("a") == first
    with balancer.lease("a") as again:
        assert again != first


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


# -- membership --------------------------------------------------------------------------------------------------------


def test_a_new_server_does_not_move_sessions() -> None:
    balancer = LoadBalancer(servers(3))
    homes = {str(i): held(balancer, str(i)).server for i in range(30)}
    balancer.add_server("new")
    assert {session: balancer.server_of(session) for session in homes} == homes
    assert held(balancer, "next").server == "new"


def test_removing_a_server_moves_only_its_own_sessions() -> None:
    balancer = LoadBalancer(servers(3))
    homes = {str(i): held(balancer, str(i)).server for i in range(30)}
    moved = balancer.remove_server("s1")
    assert sorted(moved) == sorted(session for session, home in homes.items() if home == "s1")
    for session, home in homes.items():
        assert held(balancer, session).server == (home if home != "s1" else balancer.server_of(session))
    assert set(balancer.in_flight) == {"s0", "s2"}


def test_releasing_a_slot_of_a_removed_server_has_no_effect() -> None:
    balancer = LoadBalancer(servers(2))
    lease = held(balancer, "a")
    balancer.remove_server(lease.server)
    assert balancer.num_leases == 0
    assert balancer.release(lease.request.id, num_new_tokens=3) == []
    balancer.add_server(lease.server)
    assert balancer.in_flight[lease.server] == 0


def test_a_request_is_queued_until_the_first_server_joins() -> None:
    balancer = LoadBalancer()
    assert balancer.acquire(SlotRequest("a/0", "a")) is None
    assert [lease.server for lease in balancer.add_server("s0")] == ["s0"]


def test_two_servers_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two servers with the name 's0'"):
        LoadBalancer(["s0", "s0"])


# -- leases ------------------------------------------------------------------------------------------------------------


def test_acquiring_twice_with_one_id_has_no_second_effect() -> None:
    balancer = balancer_of(1, max_in_flight=1)
    request, second = SlotRequest("r", "a"), SlotRequest("q", "b")
    assert balancer.acquire(request) is balancer.acquire(request)
    assert balancer.acquire(second) is None
    assert balancer.acquire(second) is None
    assert (balancer.num_leases, balancer.num_queued) == (1, 1)
    assert [lease.request.id for lease in balancer.release("r")] == ["q"]
    assert balancer.release("r") == []
    assert balancer.num_leases == 1


def test_dropping_an_owner_releases_its_slots_and_queued_requests() -> None:
    balancer = balancer_of(1, max_in_flight=2)
    mine = [held(balancer, f"m{i}", owner="worker-1") for i in range(2)]
    queued = SlotRequest("w", "other", owner="worker-2")
    assert balancer.acquire(queued) is None
    assert balancer.acquire(SlotRequest("x", "m9", owner="worker-1")) is None
    (granted,) = balancer.drop_owner("worker-1")
    assert granted.request is queued
    assert (balancer.num_leases, balancer.num_queued) == (1, 0)
    assert balancer.server_of(mine[0].request.session) is None


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


def test_a_released_request_leaves_the_queue() -> None:
    balancer = balancer_of(1, max_in_flight=1)
    first = held(balancer, "a")
    balancer.acquire(SlotRequest("gone", "b"))
    balancer.acquire(SlotRequest("stays", "c"))
    balancer.release("gone")
    assert [lease.request.id for lease in balancer.release(first.request.id)] == ["stays"]


def test_longest_first_grants_the_request_with_the_most_remaining_work_first() -> None:
    balancer = balancer_of(1, max_in_flight=1, longest_first=True)
    first = held(balancer, "a")
    for session, remaining in (("short", 10.0), ("long", 900.0), ("middle", 50.0)):
        ask(balancer, session, expected_remaining=remaining)
    order = []
    while first is not None:
        granted = balancer.release(first.request.id)
        first = granted[0] if granted else None
        if first is not None:
            order.append(first.request.session)
    assert order == ["long", "middle", "short"]


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

    @rule(session=st.integers(0, 9), length=st.integers(1, 5000), owner=st.sampled_from(["w0", "w1"]))
    def acquire(self, session: int, length: int, owner: str) -> None:
        request = SlotRequest(f"r{next(ids)}", f"{owner}-{session}", owner, length)
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

    @rule(owner=st.sampled_from(["w0", "w1"]))
    def drop_owner(self, owner: str) -> None:
        self.queued -= {w.request.id for w in self.balancer._queued.values() if w.request.owner == owner}
        self.held = {key: lease for key, lease in self.held.items() if lease.request.owner != owner}
        granted = self.balancer.drop_owner(owner)
        self.record([lease for lease in granted if lease.request.owner != owner])

    @rule(session=st.integers(0, 9), owner=st.sampled_from(["w0", "w1"]))
    def end_session(self, session: int, owner: str) -> None:
        name = f"{owner}-{session}"
        if not any(w.request.session == name for w in self.balancer._queued.values()) and not any(
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
            assert len(self.balancer._unassigned) == 0


TestBalancerStateMachine = BalancerStateMachine.TestCase
TestBalancerStateMachine.settings = examples(60, stateful_step_count=40)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_counts_return_to_zero_after_all_leases_are_released(steps: list[tuple[int, bool]]) -> None:
    balancer = LoadBalancer(servers(3))
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


@given(st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 9)), max_size=60))
def test_the_first_name_of_a_priority_queue_has_the_lowest_key(changes: list[tuple[int, int | None]]) -> None:
    ranking: IndexedPriorityQueue[tuple[int]] = IndexedPriorityQueue()
    keys: dict[str, tuple[int]] = {}
    for name, key in changes:
        if key is None:
            ranking.discard(str(name))
            keys.pop(str(name), None)
        else:
            ranking.put(str(name), (key,))
            keys[str(name)] = (key,)
        assert ranking.first_key() == min(keys.values(), default=None)
        odd = min((key for name, key in keys.items() if int(name) % 2), default=None)
        found = ranking.first_where(lambda name: int(name) % 2 == 1, at_most=100)
        assert (None if found is None else keys[found]) == odd
        assert len(ranking) == len(keys)
