"""Was anything lost or done twice? Pure: the orders against the ledger's report and the node's own count."""

from collections.abc import Iterable

import msgspec

from agentrt.demo.ledger import Report
from agentrt.demo.load import Order


class Verdict(msgspec.Struct):
    """``lost``: accepted runs without a terminal state or with a missing effect, and orders never accepted.
    ``duplicates``: effects entered under more than one key, effects nobody ordered, and runs beyond one an order.
    ``failed``: runs that ended in another state than SUCCEEDED. ``findings``: the first of each, in words."""

    accepted: int
    finished: int
    failed: int
    lost: int
    duplicates: int
    dropped: int
    findings: list[str]

    @property
    def passed(self) -> bool:
        return not (self.lost or self.duplicates or self.failed) and self.accepted == self.finished > 0


def judge(orders: Iterable[Order], report: Report, runs_in_store: int) -> Verdict:
    """The verdict over all orders that were sent."""
    accepted = finished = failed = lost = duplicates = 0
    findings: list[str] = []
    entries = dict(report.entries)
    for order in orders:
        places = entries.pop(order.id, {})
        accepted += bool(order.run_id)
        finished += bool(order.state)
        if not order.run_id or not order.state:
            lost += 1
            findings.append(f"{order.id}: " + ("run has no end" if order.run_id else "was never accepted"))
            continue
        if order.state != "SUCCEEDED":
            failed += 1
            findings.append(f"{order.id}: {order.run_id} is {order.state}")
        missing = [place for place in range(1, order.places + 1) if place not in places]
        if missing and order.state == "SUCCEEDED":
            lost += 1
            findings.append(f"{order.id}: effects {missing} are missing")
        extra = sum(times - 1 for times in places.values()) + sum(place > order.places for place in places)
        if extra:
            duplicates += extra
            findings.append(f"{order.id}: effects {places} instead of 1 to {order.places}, each once")
    for order_id in entries:
        duplicates += 1
        findings.append(f"{order_id}: effects of an order that was never sent")
    if runs_in_store != accepted:
        duplicates += max(0, runs_in_store - accepted)
        lost += max(0, accepted - runs_in_store)
        findings.append(f"the store holds {runs_in_store} runs for {accepted} accepted orders")
    return Verdict(accepted, finished, failed, lost, duplicates, report.dropped, findings[:20])
