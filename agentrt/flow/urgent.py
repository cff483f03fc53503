"""How often each tenant may begin a run of tier 0: urgent work goes before everybody else's, so nobody may have it
without end. Pure; a bucket of each tenant that has begun some lately."""

from collections.abc import Mapping
from typing import Final

from agentrt.flow.buckets import Bucket, RateLimit

#: Buckets of tenants, beyond which those that are full again are forgotten: they say nothing.
TENANTS_MAX: Final = 10_000


class UrgentRates:
    """``per_minute``: of each tenant that ``tenants`` does not name; 0: as many as it likes."""

    def __init__(self, per_minute: int = 0, tenants: Mapping[str, int] | None = None) -> None:
        self._per_minute = per_minute
        self._tenants = dict(tenants or {})
        self._buckets: dict[str, Bucket] = {}
        self._sweep_at = TENANTS_MAX
        #: Whether there is any limit.
        self.active: Final = bool(per_minute or any(self._tenants.values()))

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def memory_ns(self) -> int:
        """What was begun in so long before a restart is to be recalled: ten times as long as the slowest bucket takes
        to fill."""
        limits = [limit for limit in (self._per_minute, *self._tenants.values()) if limit]
        return max((10 * _fill_ns(limit) for limit in limits), default=0)

    def recall(self, tenant: str, at_ns: int, since_ns: int) -> None:
        """One was begun before this start of the node; the oldest first, all since ``since_ns``, before any `take`.
        What had been begun earlier nobody knows: as many as could have been."""
        limit = self._tenants.get(tenant, self._per_minute)
        if not limit:
            return
        bucket = self._buckets.get(tenant)
        if bucket is None:
            bucket = self._buckets[tenant] = Bucket(RateLimit(limit, kept_pct=0))
            bucket.full_ns = since_ns + _fill_ns(limit)
        bucket.take(1, at_ns)

    def take(self, tenant: str, now_ns: int) -> int:
        """Begin one. 0: it may be begun; else the ns until the next one may be."""
        limit = self._tenants.get(tenant, self._per_minute)
        if not limit:
            return 0
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= self._sweep_at:
                self._sweep(now_ns)
            bucket = self._buckets[tenant] = Bucket(RateLimit(limit, kept_pct=0))
        free_ns = bucket.free_ns(0, 1, now_ns)
        if free_ns > now_ns:
            return free_ns - now_ns
        bucket.take(1, now_ns)
        return 0

    def _sweep(self, now_ns: int) -> None:
        self._buckets = {tenant: bucket for tenant, bucket in self._buckets.items() if bucket.full_ns > now_ns}
        self._sweep_at = max(TENANTS_MAX, 2 * len(self._buckets))


def _fill_ns(limit: int) -> int:
    """How long an empty bucket takes to be full."""
    return Bucket(RateLimit(limit, kept_pct=0)).price_ns(max(1, limit // 10))
