"""Just enough of PromQL to try the queries of docs/observability.md: two scrapes stand for a range, and vectors are
matched by their labels as Prometheus does it, so that a query which would be empty there is empty here."""

import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]
Vector = dict[Labels, float]

_TOKEN = re.compile(r'\s*([A-Za-z_][\w]*|\d+(?:\.\d+)?|"[^"]*"|\[\w+\]|[{}(),=/*+-])')


class Scrape:
    """Samples by name and labels, those of the scraper among them."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, Vector] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = sample.labels | {"instance": "here:8420", "job": "agentrt"}
                self.samples.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value


def ask(query: str, before: Scrape, after: Scrape) -> Vector:
    """What the query gives for the time between two scrapes."""
    tokens = _TOKEN.findall(query)
    assert "".join(tokens) == query.replace(" ", ""), query
    reader = _Reader(tokens, before, after)
    found = reader.sum()
    assert not reader.tokens, reader.tokens
    assert isinstance(found, dict), query
    return found


class _Reader:
    def __init__(self, tokens: list[str], before: Scrape, after: Scrape) -> None:
        self.tokens, self.before, self.after = tokens, before, after

    def _next(self, expected: str | None = None) -> str:
        token = self.tokens.pop(0)
        assert expected is None or token == expected, (token, expected, self.tokens)
        return token

    def _at(self, token: str) -> bool:
        return self.tokens[:1] == [token]

    def sum(self) -> Any:
        left = self._product()
        while self._at("-") or self._at("+"):
            sign = 1 if self._next() == "+" else -1
            left = _combine(left, self._product(), lambda a, b, sign=sign: a + sign * b)
        return left

    def _product(self) -> Any:
        left = self._value()
        while self._at("/") or self._at("*"):
            if self._next() == "/":
                left = _combine(left, self._value(), lambda a, b: a / b)
            else:
                left = _combine(left, self._value(), lambda a, b: a * b)
        return left

    def _value(self) -> Any:
        token = self._next()
        if token == "(":
            found = self.sum()
            self._next(")")
            return found
        if token[0].isdigit():
            return float(token)
        if token == "rate":
            self._next("(")
            now, then = self._selected()
            self._next(")")
            return {labels: value - then.get(labels, 0.0) for labels, value in now.items()}
        if token == "sum":
            return self._grouped()
        if token == "histogram_quantile":
            self._next("(")
            q = float(self._next())
            self._next(",")
            found = _quantile(q, self.sum())
            self._next(")")
            return found
        self.tokens.insert(0, token)
        return self._selected()[0]

    def _selected(self) -> tuple[Vector, Vector]:
        """Now and then."""
        name, wanted = self._next(), {}
        if self._at("{"):
            self._next()
            while not self._at("}"):
                label = self._next()
                self._next("=")
                wanted[label] = self._next().strip('"')
                if self._at(","):
                    self._next()
            self._next("}")
        if self.tokens and self.tokens[0].startswith("["):
            self._next()
        assert name in self.after.samples, f"there is no metric {name}"
        now, then = (
            {
                labels: value
                for labels, value in scrape.samples[name].items()
                if all(dict(labels).get(label) == value for label, value in wanted.items())
            }
            for scrape in (self.after, self.before)
        )
        assert now, f"no series of {name} has {wanted}"
        return now, then

    def _grouped(self) -> Vector:
        kept: list[str] = []
        if self._at("by"):
            self._next()
            self._next("(")
            kept.append(self._next())
            while self._at(","):
                self._next()
                kept.append(self._next())
            self._next(")")
        self._next("(")
        values = self.sum()
        self._next(")")
        found: Vector = {}
        for labels, value in values.items():
            key = tuple(pair for pair in labels if pair[0] in kept)
            found[key] = found.get(key, 0.0) + value
        return found


def _combine(left: Any, right: Any, how: Any) -> Any:
    if isinstance(left, float) and isinstance(right, float):
        return how(left, right)
    if isinstance(left, float):
        return {labels: how(left, value) for labels, value in right.items()}
    if isinstance(right, float):
        return {labels: how(value, right) for labels, value in left.items()}
    return {labels: how(value, right[labels]) for labels, value in left.items() if labels in right}


def _quantile(q: float, buckets: Vector) -> Vector:
    """As Prometheus spreads values: evenly within a bucket."""
    ((rest, counts),) = _by_le(buckets).items()
    bounds = sorted(counts)
    rank, low, below = q * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if bound == float("inf"):
                return {rest: low}
            return {rest: low + (bound - low) * (rank - below) / (counts[bound] - below)}
        low, below = bound, counts[bound]
    raise AssertionError("no bucket has them all")


def _by_le(buckets: Vector) -> dict[Labels, dict[float, float]]:
    found: dict[Labels, dict[float, float]] = {}
    for labels, count in buckets.items():
        rest = tuple(pair for pair in labels if pair[0] != "le")
        found.setdefault(rest, {})[float(dict(labels)["le"])] = count
    return found
