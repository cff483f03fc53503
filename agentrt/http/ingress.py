"""The endpoints about buses: the sources of the node, and its dead letters. All for admins."""

import base64

import msgspec

from agentrt.http import types as t
from agentrt.http.endpoint import Call, Endpoint, Parameter
from agentrt.ingress.deadletters import DeadLetter
from agentrt.runtime import Runtime

_PAGE: int = 100


class IngressEndpoints:
    """Handlers over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def endpoints(self) -> list[Endpoint]:
        """The table's part about buses."""
        return [
            Endpoint(
                "GET",
                "/v1/ingresses",
                "admin",
                self.sources,
                "The sources whose events become runs.",
                t.IngressSources,
            ),
            Endpoint(
                "GET",
                "/v1/dead-letters",
                "admin",
                self.letters,
                "Events of buses that became no runs, without their payloads.",
                t.DeadLetters,
                parameters=(Parameter("after", "string", "the last id of the page before"),),
            ),
            Endpoint("GET", "/v1/dead-letters/{id}", "admin", self.letter, "One, with its payload.", t.DeadLetterInfo),
            Endpoint(
                "POST",
                "/v1/dead-letters/{id}/retry",
                "admin",
                self.retry,
                "Make the event's one run of it after all, and drop it.",
                t.RetriedLetter,
            ),
            Endpoint("DELETE", "/v1/dead-letters/{id}", "admin", self.drop, "Throw one away.", status=204),
        ]

    async def sources(self, call: Call) -> t.IngressSources:
        found = self._runtime.ingress_statistics()
        return t.IngressSources(
            sources=[
                t.IngressSource(name=name, **msgspec.structs.asdict(statistics)) for name, statistics in found.items()
            ]
        )

    async def letters(self, call: Call) -> t.DeadLetters:
        found = await self._runtime.dead_letters.list(call.query("after", default=""), _PAGE)
        return t.DeadLetters(letters=[_info(letter) for letter in found])

    async def letter(self, call: Call) -> t.DeadLetterInfo:
        letter = await self._runtime.dead_letters.get(call.path("id"))
        payload = letter.delivery.payload
        try:
            return _info(letter, payload=payload.decode())
        except UnicodeDecodeError:
            return _info(letter, payload_base64=base64.b64encode(payload).decode())

    async def retry(self, call: Call) -> t.RetriedLetter:
        return t.RetriedLetter(run_id=await self._runtime.dead_letters.retry(call.path("id")))

    async def drop(self, call: Call) -> None:
        await self._runtime.dead_letters.drop(call.path("id"))


def _info(letter: DeadLetter, **payload: str) -> t.DeadLetterInfo:
    delivery = letter.delivery
    return t.DeadLetterInfo(
        id=letter.id,
        ingress=letter.source_name,
        source=delivery.source,
        partition=delivery.partition,
        offset=delivery.offset,
        topic=delivery.topic,
        agent=letter.agent,
        tenant=letter.tenant,
        code=letter.code,
        message=letter.message,
        size_bytes=len(delivery.payload),
        at=letter.at_ns / 1e9,
        **payload,
    )
