"""Callbacks: where they may go, how they are signed, and whose turn it is."""

import asyncio
import base64
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentrt.callbacks.address import (
    Target,
    UnreachableTargetError,
    check_url,
    parse_networks,
    resolve,
)
from agentrt.callbacks.queue import CallbackQueue
from agentrt.callbacks.signing import headers_of, secret_text
from agentrt.errors import ConfigError, InputError

OWN = parse_networks(["127.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https:///path",
        "https://",
        "//example.com",
        "https://user@example.com/",
        "https://u:p@example.com/",
        "https://example.com\\@127.0.0.1/",
        "https://example.com:99999/",
        "https://example.com:0/",
        "https://exa mple.com/",
        "https://example.com/\r\nx: y",
        "https://[::1/",
        "https://127.0.0.1/",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://192.168.1.1/",
        "https://100.64.0.1/",
        "https://0.0.0.0/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://[::1]/",
        "https://[::]/",
        "https://[fe80::1]/",
        "https://[fd00::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[64:ff9b::7f00:1]/",
        "https://[2002:7f00:1::]/",
        "https://[ff02::1]/",
        "https://example.com/" + "x" * 2_100,
    ],
)
def test_what_only_this_host_can_reach_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        check_url(url, ())


def test_what_is_public_or_allowed_is_taken() -> None:
    assert check_url("https://example.com:8443/a?b", ()) == Target("https", "example.com", 8443)
    assert check_url("https://8.8.8.8", ()).port == 443
    assert check_url("https://[2606:4700:4700::1111]/", ()).host == "2606:4700:4700::1111"
    assert check_url("http://127.0.0.1:80/", OWN) == Target("http", "127.0.0.1", 80)
    with pytest.raises(InputError):
        check_url("http://8.8.8.8/", OWN)  # without TLS to allowed networks only
    with pytest.raises(ConfigError):
        parse_networks(["10.0.0.1/8"])


@pytest.mark.parametrize(
    ("answers", "allowed", "taken"),
    [
        (["93.184.215.14"], (), True),
        (["2606:4700:4700::1111", "1.1.1.1"], (), True),
        (["127.0.0.1"], (), False),
        (["93.184.215.14", "10.0.0.1"], (), False),
        (["fe80::1%eth0"], (), False),
        (["127.0.0.1"], OWN, True),
        ([], (), False),
    ],
)
def test_every_address_of_a_name_is_looked_at(answers: list[str], allowed: Any, taken: bool) -> None:
    async def look() -> list[str]:
        async def answer(*_: Any, **__: Any) -> list[Any]:
            return [(0, 0, 0, "", (address, 443)) for address in answers * 2]

        loop = asyncio.get_running_loop()
        loop.getaddrinfo = answer  # type: ignore[method-assign]
        return [str(each) for each in await resolve(Target("https", "name.example", 443), allowed, 1.0)]

    if not taken:
        with pytest.raises(UnreachableTargetError):
            asyncio.run(look())
    else:
        assert asyncio.run(look()) == answers


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The example of its libraries' own tests."""
    text = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    secret = base64.b64decode(text.removeprefix("whsec_"))
    assert secret_text(secret) == text
    headers = headers_of([secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    both = headers_of([bytes(32), secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert both["webhook-signature"].split(" ")[1] == headers["webhook-signature"]


class Queues(RuleBasedStateMachine):
    """The queue against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = CallbackQueue(12, 5, 2)
        self.waiting: dict[str, tuple[str, int]] = {}
        self.under_way: dict[str, str] = {}
        self.now = 0

    @rule(tenant=st.sampled_from("abc"), number=st.integers(0, 15), due=st.integers(0, 20))
    def add(self, tenant: str, number: int, due: int) -> None:
        run_id = f"{tenant}{number}"
        self.queue.add(tenant, run_id, due)
        if run_id in self.waiting or run_id in self.under_way:
            return
        if len(self.waiting) + len(self.under_way) >= 12:
            assert self.queue.overflowed
        else:
            self.waiting[run_id] = (tenant, due)

    def may(self) -> list[str]:
        if len(self.under_way) >= 5:
            return []
        busy = [*self.under_way.values()]
        return [run_id for run_id, (tenant, _) in self.waiting.items() if busy.count(tenant) < 2]

    @rule()
    def take(self) -> None:
        due = [run_id for run_id in self.may() if self.waiting[run_id][1] <= self.now]
        found = self.queue.take(self.now)
        if found is None:
            assert not due
            return
        tenant, run_id = found
        assert run_id in due
        assert self.waiting[run_id][1] == min(self.waiting[each][1] for each in due if each[0] == tenant)
        self.under_way[run_id] = self.waiting.pop(run_id)[0]

    @rule(data=st.data(), again=st.none() | st.integers(0, 30))
    def finish(self, data: st.DataObject, again: int | None) -> None:
        if self.under_way:
            run_id = data.draw(st.sampled_from(sorted(self.under_way)))
            tenant = self.under_way.pop(run_id)
            self.queue.finish(tenant, run_id, again)
            if again is not None:
                self.waiting[run_id] = (tenant, again)

    @rule(by=st.integers(1, 10))
    def pass_time(self, by: int) -> None:
        self.now += by

    @invariant()
    def it_knows_when_to_look_again(self) -> None:
        assert self.queue.next_ns() == min((self.waiting[run_id][1] for run_id in self.may()), default=None)
        assert len(self.queue) == len(self.waiting) + len(self.under_way)


TestQueues = Queues.TestCase
TestQueues.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_tenant_with_many_does_not_hold_up_the_others() -> None:
    queue = CallbackQueue(1000, 4, 3)
    for number in range(100):
        queue.add("noisy", f"n{number}", 0)
    queue.add("quiet", "q", 5)
    assert [queue.take(10) for _ in range(5)] == [
        ("noisy", "n0"),
        ("quiet", "q"),
        ("noisy", "n1"),
        ("noisy", "n10"),
        None,
    ]
