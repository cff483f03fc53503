"""Who waits for whom, and so which tier each is lent. Pure.

Nodes are runs (their ids) and locks (their addresses). A run that waits for a lock has an edge to it with the run's own
tier, a lock has one to its holder, a run that joins a child one to the child. What flows along an edge is the higher of
its own tier and what its source is lent; a node is lent the highest that flows in. So whoever holds up a tier runs at
it, over any number of others in between. A join alone lends nothing, only what its run is lent itself.

Every node counts what flows in by tier, so an edge more or less costs its target and those behind it, not its siblings.
In a circle, which is a deadlock, tiers keep each other up until somebody breaks it.
"""

from collections.abc import Callable
from typing import Final

Node = str | bytes
#: Of a node that is lent no tier; below all tiers.
NOT_LENT: Final = 4


class _Edge:
    __slots__ = ("flows", "target", "tier")

    def __init__(self, target: Node, tier: int, flows: int) -> None:
        self.target, self.tier, self.flows = target, tier, flows


class Lending:
    """``changed(run_id)`` is called, within `connect` or `disconnect`, for each run that is lent another tier now."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._out: dict[Node, dict[str, _Edge]] = {}
        self._in: dict[Node, list[int]] = {}  # by what flows, the last of those that lend nothing

    def __len__(self) -> int:
        return len(self._out)

    def tier(self, node: Node) -> int:
        """The highest tier that the node is lent, or NOT_LENT."""
        flows = self._in.get(node)
        if flows is None:
            return NOT_LENT
        return next((tier for tier in range(NOT_LENT) if flows[tier]), NOT_LENT)

    def connect(self, source: Node, key: str, target: Node, tier: int = NOT_LENT) -> None:
        """The source waits for the target, with a tier of its own; ``key`` tells its waits apart, and a second one
        takes the place of the first."""
        self.disconnect(source, key)
        edge = _Edge(target, tier, min(tier, self.tier(source)))
        self._out.setdefault(source, {})[key] = edge
        before = self.tier(target)
        self._in.setdefault(target, [0] * (NOT_LENT + 1))[edge.flows] += 1
        self._spread(target, before)

    def disconnect(self, source: Node, key: str) -> Node | None:
        """That wait is over. Returns what was waited for, None if there was no such wait."""
        edges = self._out.get(source)
        edge = None if edges is None else edges.pop(key, None)
        if edges is None or edge is None:
            return None
        if not edges:
            del self._out[source]
        target = edge.target
        before = self.tier(target)
        flows = self._in[target]
        flows[edge.flows] -= 1
        if not any(flows):
            del self._in[target]
        self._spread(target, before)
        return target

    def waits_of(self, source: Node) -> dict[str, Node]:
        """What the source waits for, by key."""
        return {key: edge.target for key, edge in self._out.get(source, {}).items()}

    def way(self, start: Node, goal: Node) -> list[tuple[Node, str]] | None:
        """Waits that lead from the start to the goal, as (source, key); None if none do."""
        came: dict[Node, tuple[Node, str] | None] = {start: None}
        todo = [start]
        while todo:
            node = todo.pop()
            if node == goal:
                found: list[tuple[Node, str]] = []
                while (step := came[node]) is not None:
                    found.append(step)
                    node = step[0]
                return found[::-1]
            for key, edge in self._out.get(node, {}).items():
                if edge.target not in came:
                    came[edge.target] = node, key
                    todo.append(edge.target)
        return None

    def _spread(self, node: Node, before: int) -> None:
        """What the node is lent may have changed: pass it on."""
        todo = [(node, before)]
        while todo:
            node, before = todo.pop()
            now = self.tier(node)
            if now == before:
                continue
            if isinstance(node, str):
                self._changed(node)
            for edge in self._out.get(node, {}).values():
                flows = min(edge.tier, now)
                if flows != edge.flows:
                    was = self.tier(edge.target)
                    counts = self._in[edge.target]
                    counts[edge.flows] -= 1
                    counts[flows] += 1
                    edge.flows = flows
                    todo.append((edge.target, was))
