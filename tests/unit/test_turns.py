"""Turns: one at a time, by tier, then by who came first, whoever is cancelled."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.turns import Turns


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_the_most_urgent_goes_next_and_nobody_is_forgotten(who: list[tuple[int, bool]]) -> None:
    """Each comes while the first has its turn; some are cancelled while they wait."""
    order: list[int] = []

    async def main() -> None:
        turns, inside = Turns(), 0

        async def work(number: int, tier: int) -> None:
            nonlocal inside
            async with turns.turn(tier):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                order.append(number)
                inside -= 1

        async with turns.turn(3):
            tasks = [asyncio.ensure_future(work(number, tier)) for number, (tier, _) in enumerate(who)]
            await asyncio.sleep(0)
            for task, (_, gone) in zip(tasks, who, strict=True):
                if gone:
                    task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ends] == [gone for _, gone in who]
        async with turns.turn(0):
            pass  # it is free again

    asyncio.run(main())
    assert order == sorted((n for n, (_, gone) in enumerate(who) if not gone), key=lambda n: (who[n][0], n))


def test_a_turn_that_was_given_to_somebody_who_is_cancelled_goes_on() -> None:
    async def main() -> None:
        turns = Turns()
        first = turns.turn(0)
        await first.__aenter__()

        async def work() -> None:
            async with turns.turn(0):
                pass

        given, waits = asyncio.ensure_future(work()), asyncio.ensure_future(work())
        await asyncio.sleep(0)
        await first.__aexit__(None, None, None)  # it is `given`'s now, which does not know yet
        given.cancel()
        await asyncio.wait_for(waits, 10)
        assert given.cancelled()

    asyncio.run(main())
