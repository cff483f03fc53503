"""Which callback is next: due ones, tenant by tenant, so that one whose receiver is slow delays nobody else. Pure."""

import heapq
from collections import Counter, deque


class CallbackQueue:
    """Callbacks that wait for their time, and those under way. ``per_tenant_max``: of these, of one tenant."""

    def __init__(self, items_max: int, under_way_max: int, per_tenant_max: int) -> None:
        self._items_max = items_max
        self._under_way_max = under_way_max
        self._per_tenant_max = per_tenant_max
        self._waiting: dict[str, list[tuple[int, str]]] = {}  # by tenant: heaps of (due_ns, run_id)
        self._turns: deque[str] = deque()  # tenants with something that waits, each once
        self._known: set[str] = set()  # run ids that wait or are under way
        self._under_way: Counter[str] = Counter()
        #: Some did not fit, and are to be looked for in the store once there is room.
        self.overflowed = False

    def __len__(self) -> int:
        return len(self._known)

    def add(self, tenant: str, run_id: str, due_ns: int) -> None:
        """Once per run, whoever says so again."""
        if run_id in self._known:
            return
        if len(self._known) >= self._items_max:
            self.overflowed = True
            return
        self._known.add(run_id)
        self._put(tenant, run_id, due_ns)

    def _put(self, tenant: str, run_id: str, due_ns: int) -> None:
        heap = self._waiting.get(tenant)
        if heap is None:
            heap = self._waiting[tenant] = []
            self._turns.append(tenant)
        heapq.heappush(heap, (due_ns, run_id))

    def take(self, now_ns: int) -> tuple[str, str] | None:
        """(tenant, run_id) of one that is due and may begin; it is under way until `finish`."""
        if self._under_way.total() >= self._under_way_max:
            return None
        for _ in range(len(self._turns)):
            tenant = self._turns.popleft()
            heap = self._waiting[tenant]
            if heap[0][0] > now_ns or self._under_way[tenant] >= self._per_tenant_max:
                self._turns.append(tenant)
                continue
            _, run_id = heapq.heappop(heap)
            if heap:
                self._turns.append(tenant)
            else:
                del self._waiting[tenant]
            self._under_way[tenant] += 1
            return tenant, run_id
        return None

    def finish(self, tenant: str, run_id: str, again_ns: int | None) -> None:
        """It is not under way any more; None: nor owed."""
        self._under_way[tenant] -= 1
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        if again_ns is None:
            self._known.discard(run_id)
        else:
            self._put(tenant, run_id, again_ns)

    def next_ns(self) -> int | None:
        """When the next one is due that may begin then; None if something must finish first, or nothing waits."""
        if self._under_way.total() >= self._under_way_max:
            return None
        return min(
            (heap[0][0] for tenant, heap in self._waiting.items() if self._under_way[tenant] < self._per_tenant_max),
            default=None,
        )
