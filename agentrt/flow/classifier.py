"""The ingress classifier: which agent, tier, tenant and idempotency key a request of a door gets. Pure rules, as data.

The first rule whose conditions all hold decides; what it does not set is as the request has it. Conditions and names
may hold ``*`` and ``?``; a field of the payload is named by its path (``order.kind``) and compared as JSON text without
quotes. A rule may make an idempotency key from the request (``{header:x-id}``, ``{field:order.id}``, ``{source}``,
``{type}``): the same delivery twice is one run.

However a tier was come by, it is never more urgent than the tenant's ``max_tier``, nor than the caller may have.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from agentrt.errors import ConfigError
from agentrt.flow.decisions import Action, Control, Decision, Scope
from agentrt.tiers import parse_tier

_PART: Final = re.compile(r"\{(?:(header|field):([^{}]{1,200})|(source|type|tenant|door))\}")
_KEY_CHARS_MAX: Final = 512
_TEXT_CHARS_MAX: Final = 1_000
RULES_MAX: Final = 1_000
_SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization"})


class Ingress(msgspec.Struct, frozen=True):
    """What came in. Header names are lower case. ``payload`` is plain data. ``tenant`` is who was authenticated."""

    door: str  # http, cli, bus, embedding, schedule, spawn
    tenant: str
    source: str = ""  # topic, path, address
    type: str = ""  # of the event
    headers: Mapping[str, str] = {}
    payload: Any = None
    agent: str = ""  # asked for, as the tier and the key
    tier: int | None = None
    idempotency_key: str | None = None
    max_tier: int = 0  # of the caller


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions, then what is set; "" and None leave it."""

    door: str = ""
    tenant: str = ""
    source: str = ""
    type: str = ""
    headers: dict[str, str] = {}
    fields: dict[str, str] = {}
    agent: str = ""
    set_agent: str = ""
    set_tier: int | str | None = None
    set_key: str | None = None
    refuse: str = ""  # the reason


class Classified(msgspec.Struct, frozen=True):
    """``agent`` "": no rule and no request names one. ``refused``: why it may not come in; ``incomplete``: because a
    rule makes its key of what it does not have. ``key`` None: none."""

    tenant: str
    agent: str
    tier: int | None
    key: str | None
    rule: int | None  # number of the rule, from 0
    refused: str = ""
    incomplete: bool = False
    decision: Decision | None = None  # if the request got something else than it asked for


class Classifier:
    """Compiled rules. Raises ConfigError on what cannot be meant."""

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        max_tiers: Mapping[str, int] | None = None,
        max_tier: int = 0,
    ) -> None:
        """``max_tiers``: the most urgent tier by tenant, ``max_tier``: that of all others."""
        if len(rules) > RULES_MAX:
            raise ConfigError(f"{len(rules)} rules of the classifier", hint=f"At most {RULES_MAX}")
        self._max_tiers = dict(max_tiers or {})
        self._max_tier = max_tier
        self._rules = [_Compiled(number, rule) for number, rule in enumerate(rules)]
        #: Whether it may say anything but that all is as it was asked for.
        self.active: Final = bool(rules or max_tier or any(self._max_tiers.values()))
        #: What rules look at: doors need to show nothing else of a request.
        self.header_names: Final = frozenset(name for rule in self._rules for name in rule.header_names)
        #: Whether a request may get an idempotency key that it does not show.
        self.makes_keys: Final = any(rule.key is not None for rule in self._rules)
        self.reads_payload: Final = any(rule.reads_payload for rule in self._rules)

    def classify(self, ingress: Ingress, now_ns: int = 0) -> Classified:
        """What becomes of a request."""
        agent, tier, key, number, refused = ingress.agent, ingress.tier, ingress.idempotency_key, None, ""
        incomplete = False
        for rule in self._rules:
            if rule.matches(ingress):
                number, refused = rule.number, rule.refuse
                agent = rule.agent or agent
                tier = tier if rule.tier is None else rule.tier
                if rule.key is not None:
                    made = rule.key_of(ingress)
                    if made is None:
                        incomplete = not refused
                        refused = refused or f"rule {number} makes its key from what the request does not have"
                    key = made
                break
        bound = max(self.max_tier(ingress.tenant), ingress.max_tier)
        bounded = tier is not None and tier < bound
        if bounded:
            tier = bound
        decision = None
        if refused or bounded or number is not None:
            decision = Decision(
                at_ns=now_ns,
                control=Control.CLASSIFIER,
                action=Action.REFUSE if refused else Action.CLASSIFY,
                scope=Scope.DOOR,
                name=ingress.door,
                limit="max_tier" if bounded else "",
                value=ingress.tier or 0,
                bound=bound,
                detail=refused[:500],
            )
        return Classified(ingress.tenant, agent, tier, key, number, refused, incomplete, decision)

    def max_tier(self, tenant: str) -> int:
        """The most urgent tier of a tenant."""
        return self._max_tiers.get(tenant, self._max_tier)


class _Compiled:
    """One rule, ready to be asked."""

    def __init__(self, number: int, rule: Rule) -> None:
        self.number = number
        self.agent = rule.set_agent
        self.refuse = rule.refuse
        self.key = rule.set_key
        self.tier = None if rule.set_tier is None else int(parse_tier(rule.set_tier))
        simple = {"door": rule.door, "tenant": rule.tenant, "source": rule.source, "type": rule.type}
        simple["agent"] = rule.agent
        self._simple = [(name, _Glob(text)) for name, text in simple.items() if text]
        self._headers = [(name.lower(), _Glob(text)) for name, text in rule.headers.items()]
        self._fields = [(path.split("."), _Glob(text)) for path, text in rule.fields.items()]
        parts = [match.groups() for match in _PART.finditer(rule.set_key or "")]
        named = {name.lower() for kind, name, _ in parts if kind == "header"}
        self.header_names = named | {name for name, _ in self._headers}
        self.reads_payload = bool(self._fields) or any(kind == "field" for kind, _, _ in parts)
        if secret := self.header_names & _SECRET_HEADERS:
            raise ConfigError(f"rule {number} of the classifier looks at {min(secret)}", hint="It holds secrets")
        if rule.set_key is not None:
            rest = _PART.sub("", rule.set_key)
            if "{" in rest or "}" in rest or len(rule.set_key) > _KEY_CHARS_MAX or not _PART.search(rule.set_key):
                raise ConfigError(
                    f"rule {number} of the classifier: {rule.set_key[:100]!r} makes no key",
                    hint="Use {header:NAME}, {field:PATH}, {source}, {type}, {tenant}, {door}",
                )

    def matches(self, ingress: Ingress) -> bool:
        for name, pattern in self._simple:
            if not pattern.matches(getattr(ingress, name)):
                return False
        for name, pattern in self._headers:
            value = ingress.headers.get(name)
            if value is None or not pattern.matches(value):
                return False
        for path, pattern in self._fields:
            text = _field(ingress.payload, path)
            if text is None or not pattern.matches(text):
                return False
        return True

    def key_of(self, ingress: Ingress) -> str | None:
        """None: a part is missing or too long, and without it two requests would look the same."""
        assert self.key is not None
        parts: list[str] = []
        for match in _PART.finditer(self.key):
            kind, name, simple = match.groups()
            if kind == "header":
                part = ingress.headers.get(name.lower())
            elif kind == "field":
                part = _field(ingress.payload, name.split("."))
            else:
                part = getattr(ingress, simple)
            if not part or len(part) > _KEY_CHARS_MAX:
                return None
            parts.append(part)
        values = iter(parts)
        made = _PART.sub(lambda match: next(values), self.key)
        return made if len(made) <= 4 * _KEY_CHARS_MAX else None


class _Glob:
    """``*`` and ``?``, in time that grows with text times pattern: no pattern can be made to explode."""

    __slots__ = ("_last_chars", "_parts", "_whole")

    def __init__(self, text: str) -> None:
        if len(text) > _TEXT_CHARS_MAX:
            raise ConfigError(f"a pattern of the classifier is too long: {text[:100]!r}")
        self._parts = [
            re.compile("".join("." if char == "?" else re.escape(char) for char in part), re.DOTALL)
            for part in text.split("*")
        ]
        self._whole = len(self._parts) == 1
        self._last_chars = len(text.split("*")[-1])

    def matches(self, value: str) -> bool:
        if len(value) > _TEXT_CHARS_MAX:
            return False
        parts = self._parts
        if self._whole:
            return parts[0].fullmatch(value) is not None
        first = parts[0].match(value)
        if first is None:
            return False
        at = first.end()
        for part in parts[1:-1]:  # the leftmost place leaves most to the others
            found = part.search(value, at)
            if found is None:
                return False
            at = found.end()
        start = len(value) - self._last_chars
        return start >= at and parts[-1].fullmatch(value, start) is not None


def _field(payload: Any, path: list[str]) -> str | None:
    """A field as text; None if it is not there, or is no text, number, bool or null."""
    for name in path:
        if not isinstance(payload, dict) or name not in payload:
            return None
        payload = payload[name]
    if isinstance(payload, str):
        return payload
    if payload is None or isinstance(payload, bool | int | float):
        try:
            return msgspec.json.encode(payload).decode()
        except (ValueError, OverflowError):
            return None
    return None
