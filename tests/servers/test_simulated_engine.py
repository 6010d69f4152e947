"""Tests of the queueing model, without servers, event loops or clocks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.engine import EngineModel, SimulatedEngine, SimulatedRequest

from tests.harness import examples

MODEL = EngineModel(
    step_s=0.01, step_s_per_request=0.001, prefill_tokens_per_s=1000, max_concurrent=4, kv_tokens=10_000
)


def submit(engine: SimulatedEngine, name: str, *, prompt: int = 1, new: int = 100, session: str = "") -> None:
    engine.submit(name, session=session or name, num_prompt_tokens=prompt, num_tokens=new)


def run_to_end(engine: SimulatedEngine) -> dict[str, tuple[float, SimulatedRequest]]:
    ends: dict[str, tuple[float, SimulatedRequest]] = {}
    while (due := engine.next_event()) < math.inf:
        ends |= {running.id: (engine.now, running) for running in engine.advance(due)}
    return ends


def test_a_single_request_takes_the_time_of_its_prefill_and_steps() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "a", prompt=500, new=100)
    assert run_to_end(engine)["a"][0] == pytest.approx(500 / 1000 + 100 * 0.011)


def test_a_slow_engine_takes_longer_for_prefill_and_decoding() -> None:
    engine = SimulatedEngine(
        EngineModel(step_s=0.01, step_s_per_request=0.0, prefill_tokens_per_s=1000, speed=0.5)
    )
    submit(engine, "a", prompt=500, new=100)
    assert run_to_end(engine)["a"][0] == pytest.approx(1.0 + 2.0)


def test_requests_that_decode_together_share_each_step() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "long", new=200)
    submit(engine, "short", new=100)
    ends = run_to_end(engine)
    prefills = 2 * 0.001
    assert ends["short"][0] == pytest.approx(prefills + 100 * 0.012)
    assert ends["long"][0] == pytest.approx(prefills + 100 * 0.012 + 100 * 0.011)


def test_decoding_stops_during_a_prefill() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "a", new=100)
    engine.advance(0.5)
    submit(engine, "b", prompt=3000, new=1)
    assert run_to_end(engine)["a"][0] == pytest.approx(0.001 + 3.0 + 100 * 0.011 + 0.001)


def test_requests_beyond_the_batch_are_queued() -> None:
    engine = SimulatedEngine(MODEL)
    for number in range(5):
        submit(engine, f"r{number}", new=10)
    assert (engine.num_running, engine.num_waiting) == (4, 1)
    ends = run_to_end(engine)
    assert ends["r4"][0] > ends["r3"][0]


def test_a_later_turn_prefills_only_new_tokens() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "t0", session="s", prompt=1000, new=100)
    run_to_end(engine)
    began = engine.now
    submit(engine, "t1", session="s", prompt=1150, new=10)
    ended, running = run_to_end(engine)["t1"]
    assert running.num_cached == 1100
    assert ended - began == pytest.approx(0.05 + 10 * 0.011)


def test_the_least_recently_used_session_is_evicted_first() -> None:
    engine = SimulatedEngine(MODEL)
    for session in ("old", "new"):
        submit(engine, session, session=session, prompt=4000, new=100)
        run_to_end(engine)
    submit(engine, "other", prompt=4900, new=100)
    run_to_end(engine)
    submit(engine, "new again", session="new", prompt=4150, new=10)
    assert run_to_end(engine)["new again"][1].num_cached == 4100
    submit(engine, "old again", session="old", prompt=4150, new=10)
    assert run_to_end(engine)["old again"][1].num_cached < 900


def test_the_newest_request_is_preempted_and_recomputed_when_the_cache_is_full() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "first", prompt=4000, new=2000)
    submit(engine, "second", prompt=4000, new=2000)
    ends = run_to_end(engine)
    assert [ends[name][1].num_preempted for name in ("first", "second")] == [0, 1]
    assert [ends[name][1].num_done for name in ("first", "second")] == [2000, 2000]
    assert ends["second"][0] > ends["first"][0] + 5.0  # its 5,000 tokens were computed again


def test_a_request_that_outgrows_the_cache_ends_early() -> None:
    engine = SimulatedEngine(MODEL)
    submit(engine, "a", prompt=9000, new=5000)
    assert run_to_end(engine)["a"][1].num_done == 1000


def test_a_removed_request_has_its_decoded_tokens_and_frees_its_slot() -> None:
    engine = SimulatedEngine(MODEL)
    for number in range(5):
        submit(engine, f"r{number}", new=1000)
    engine.advance(0.005 + 50 * 0.014 + 0.001)
    withdrawn = engine.remove("r0")
    assert withdrawn is not None
    assert withdrawn.num_done in (49, 50)
    assert (engine.num_running, engine.num_waiting) == (4, 0)
    assert engine.remove("r0") is None


def test_a_scaled_engine_is_as_fast_as_many_evenly_loaded_engines() -> None:
    large = SimulatedEngine(MODEL.scaled(3))
    small = SimulatedEngine(MODEL)
    for number in range(12):
        submit(large, f"r{number}", prompt=100, new=100)
    for number in range(4):
        submit(small, f"r{number}", prompt=100, new=100)
    assert run_to_end(large)["r11"][0] == pytest.approx(run_to_end(small)["r3"][0])


request_sizes = st.tuples(st.integers(0, 4), st.integers(1, 4000), st.integers(1, 3000), st.floats(0, 8))


@examples(60)
@given(st.lists(request_sizes, max_size=25))
def test_all_requests_end_and_the_cache_never_exceeds_its_capacity(
    requests: list[tuple[int, int, int, float]],
) -> None:
    engine = SimulatedEngine(MODEL)
    ended: list[SimulatedRequest] = []
    for number, (session, prompt, new, gap) in enumerate(requests):
        ended += engine.advance(engine.now + gap)
        submit(engine, f"r{number}", session=f"s{session}", prompt=prompt, new=new)
        held = engine.kv_running + engine.kv_sessions
        assert held <= MODEL.kv_tokens + 1
        assert engine.num_running <= MODEL.max_concurrent
    ended += [running for _, running in run_to_end(engine).values()]
    assert sorted(running.id for running in ended) == sorted(f"r{n}" for n in range(len(requests)))
    assert all(running.num_done == running.num_tokens for running in ended)
    assert engine.kv_running == pytest.approx(0, abs=1e-3)
