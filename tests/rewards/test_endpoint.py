"""The HTTP client of served rewards: deadlines, retries, the rate limit and the circuit breaker."""

import time
from collections import Counter

import pytest

from grpo_dist.rewards.endpoint import CircuitBreaker, Endpoint, EndpointSettings, NoReply, RateLimit
from grpo_dist.rewards.served import LLMJudge
from tests.support.patience import HANG_S, longer
from tests.support.services import StandIn, after, chat, failing, replied


def endpoint(stand_in, **settings):
    sleep = settings.pop("sleep", lambda s: None)
    return Endpoint(stand_in.base_url, EndpointSettings(**settings), sleep=sleep)


def test_the_deadline_covers_headers_and_body_together():
    """The header bytes come 0.05 s apart at most, so a timeout per read would never end the request."""
    with StandIn(lambda body, number: replied([1])) as server:
        server.drip = server.drip_headers = 1
        begin = time.monotonic()
        with pytest.raises(NoReply, match=r"not ended after 0\.4 s \(after 1 tries\)"):
            endpoint(server, timeout_s=0.4, max_retries=0).post("", {})
    assert time.monotonic() - begin < HANG_S


def test_a_server_that_is_gone_is_not_asked_for_every_sample():
    """Two requests of two attempts each open the breaker; then one attempt after each pause."""
    down = [True]
    with StandIn(lambda body, number: failing(503) if down[0] else replied([1])) as server:
        client = endpoint(server, max_retries=1, break_after=2, break_s=60)
        now = [100.0]
        client.breaker._clock = lambda: now[0]
        for _ in range(2):
            with pytest.raises(NoReply, match="HTTP 503: not now"):
                client.post("", {})
        assert len(server.requests) == 4
        for _ in range(10):
            with pytest.raises(NoReply, match="not asked: the last 2 requests or more failed"):
                client.post("", {})
        assert len(server.requests) == 4
        now[0] += 60
        with pytest.raises(NoReply, match="after 1 tries"):
            client.post("", {})
        assert len(server.requests) == 5
        down[0] = False
        now[0] += 60
        with pytest.raises(NoReply, match="not asked"):  # the pause has doubled
            client.post("", {})
        now[0] += 60
        assert [client.post("", {}), client.post("", {})] == [[1], [1]]
        client.close()


def test_the_pause_of_a_breaker_doubles_up_to_its_bound():
    now = [0.0]
    breaker, pauses = CircuitBreaker(1, 100.0, clock=lambda: now[0]), []
    breaker.failed()
    for _ in range(4):
        start = now[0]
        while not breaker.permits():
            now[0] += 1.0
        pauses.append(now[0] - start)
        breaker.failed()
    assert pauses == [100.0, 200.0, 300.0, 300.0]
    breaker.succeeded()
    assert breaker.permits() and not breaker.is_open


def test_requests_in_flight_when_the_breaker_opens_prolong_no_pause():
    """The second failure of eight at once opens it: the other six do not turn 10 s into 300."""
    now = [0.0]
    breaker = CircuitBreaker(2, 10.0, clock=lambda: now[0])
    assert all(breaker.permits() for _ in range(8))
    for _ in range(8):
        breaker.failed()
        now[0] += 1.0
    assert not breaker.permits()
    now[0] = 11.0  # 10 s after the second failure
    assert breaker.permits() and not breaker.permits()
    breaker.failed()
    breaker.failed()  # late again
    now[0] += 19.0
    assert not breaker.permits()
    now[0] += 1.0
    assert breaker.permits()


def test_a_refused_request_does_not_open_the_breaker():
    """The server is up: a prompt that is too long says nothing about the next one."""
    with StandIn(lambda body, number: failing(400) if number < 3 else replied([1])) as server:
        client = endpoint(server, break_after=1)
        for _ in range(3):
            with pytest.raises(NoReply, match="HTTP 400") as refusal:
                client.post("", {})
            assert refusal.value.status == 400
        assert client.post("", {}) == [1]
        client.close()


QUESTION = [{"role": "user", "content": "?"}]


def test_transient_failures_are_retried_with_growing_pauses():
    replies = [failing(429), failing(500), "Yes"]
    pauses = []
    with StandIn(lambda body, number: replies[number]) as stand_in:
        assert endpoint(stand_in, max_retries=2, sleep=pauses.append).chat("m", QUESTION, 8) == "Yes"
    assert len(stand_in.requests) == 3
    assert 0.375 <= pauses[0] <= 0.625 and 0.75 <= pauses[1] <= 1.25


def test_a_retry_after_header_sets_the_pause():
    pauses = []
    with StandIn(lambda body, number: [failing(429, Retry_After="7"), "No"][number]) as stand_in:
        assert endpoint(stand_in, sleep=pauses.append).chat("m", QUESTION, 8) == "No"
    assert pauses == [7.0]


def first_reply_late(timeout_s):
    """Return the reply and the numbers of requests and pauses, where the first attempt has ``timeout_s`` and
    later ones are in time.
    """
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        client._settings = EndpointSettings(timeout_s=HANG_S)

    with StandIn(lambda body, number: "Yes" if pauses else after(10 * timeout_s, "late")) as stand_in:
        client = endpoint(stand_in, timeout_s=timeout_s, sleep=pause)
        return client.chat("m", QUESTION, 8), len(stand_in.requests), len(pauses)


def test_a_slow_reply_is_abandoned_and_retried():
    for timeout_s in longer(0.3):
        outcome = first_reply_late(timeout_s)
        if outcome[1] == 2:  # the first request has arrived before it was abandoned
            break
    assert outcome == ("Yes", 2, 1)


def test_a_connection_that_breaks_within_a_reply_is_retried():
    torn = (200, chat("Yes")[:-9], {"Content-Length": "500", "Connection": "close"})
    with StandIn(lambda body, number: torn if number == 0 else "Yes") as stand_in:
        assert endpoint(stand_in, max_retries=1).chat("m", QUESTION, 8) == "Yes"
    assert len(stand_in.requests) == 2


def test_the_rate_limit_spaces_requests_evenly():
    """120 a minute are 0.5 s apart; idle time does not accumulate into a burst."""
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    limit = RateLimit(120, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        limit.wait()
    now[0] += 10.0
    for _ in range(2):
        limit.wait()
    assert slept == pytest.approx([0.5, 0.5, 0.5])


def test_workers_share_the_rate_limit():
    judge = LLMJudge(base_url="http://127.0.0.1:9/v1", model="m", requests_per_minute=60)
    intervals = [judge._connect(workers)._limit._interval for workers in (1, 4)]
    assert intervals == pytest.approx([1.0, 4.0])


def test_attempts_are_limited_and_count_against_the_rate_limit():
    with StandIn(lambda body, number: failing(500)) as stand_in:
        limited = endpoint(stand_in, max_retries=2, requests_per_minute=6000)
        waits = Counter()
        limited._limit.wait = lambda: waits.update(["wait"])
        with pytest.raises(NoReply) as failure:
            limited.chat("m", QUESTION, 8)
    assert waits["wait"] == 3 and "HTTP 500" in str(failure.value) and "after 3 tries" in str(failure.value)


def test_a_body_that_is_no_json_is_not_sent():
    with StandIn(lambda body, number: replied([1])) as server, pytest.raises(NoReply, match="no JSON"):
        endpoint(server).post("", {"when": object()})
    assert server.requests == []


def test_an_absent_server_is_a_connection_error():
    with StandIn(lambda body, number: "Yes") as stand_in:
        pass
    with pytest.raises(NoReply, match="ConnectError"):
        endpoint(stand_in, max_retries=1).chat("m", QUESTION, 8)
