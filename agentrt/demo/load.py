"""What the demo orders: four kinds of work, one a tier. Pure; randomness is passed in."""

import random
from collections.abc import Iterator
from itertools import count

import msgspec

TENANTS = ("acme", "globex", "initech")
COMPANIES = ("Aperture", "Cyberdyne", "Hooli", "Initrode", "Soylent", "Tyrell", "Umbrella", "Wonka")

#: Urgent events arrive at random, this many a second on average.
URGENT_PER_S = 25.0
#: Runs of the middle tiers kept going at a time.
STEPPERS = 6
INDEXERS = 3
#: Places in the ledger that one run of a kind must leave, each exactly once.
STEPS = 6


class Order(msgspec.Struct):
    """A piece of work and what has become of it. ``places``: effects it must leave in the ledger."""

    id: str
    agent: str
    tier: int
    tenant: str
    input: dict[str, object]
    places: int
    sent_ns: int = 0  # CLOCK_MONOTONIC, last time it was sent
    sends: int = 0
    run_id: str = ""
    state: str = ""  # terminal state of the run


class Planner:
    """Makes orders. ``hog_rounds`` is how long a tier-3 guest computes; ``texts`` how many texts there are to index."""

    def __init__(self, rng: random.Random, hog_rounds: int, texts: int) -> None:
        self._rng = rng
        self._hog_rounds = hog_rounds
        self._texts = texts
        self._numbers: Iterator[int] = count(1)

    def _order(self, agent: str, tier: int, places: int, **content: object) -> Order:
        number = next(self._numbers)
        order = f"{agent}-{number}"
        return Order(order, agent, tier, TENANTS[number % len(TENANTS)], {"order": order, **content}, places)

    def lead(self) -> Order:
        """An urgent event: qualify a lead."""
        return self._order(
            "qualifier", 0, 1, company=self._rng.choice(COMPANIES), employees=self._rng.randrange(1, 5000)
        )

    def steps(self) -> Order:
        return self._order("steps", 1, STEPS, steps=STEPS)

    def index(self) -> Order:
        return self._order("indexer", 2, 1, text=self._rng.randrange(self._texts))

    def hog(self) -> Order:
        return self._order("hog", 3, 0, rounds=self._hog_rounds)

    def next_lead_s(self) -> float:
        """Seconds until the next urgent event: a Poisson process."""
        return self._rng.expovariate(URGENT_PER_S)
