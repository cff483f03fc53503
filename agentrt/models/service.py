"""Calls to models, beside the control loop: the thread on which providers work, and the way there and back.

control loop: `plan`, `call`, `cancel`                      models thread: reads the conversation, shortens it,
      |  post                                               asks the provider, checks and prices the answer
      +---------------------------------------------------------> |
      | <---------------------------------------------------------+  outcome; pieces of text for observers
   `done(outcome)`, `on_text(text)`

JSON of megabytes, TLS and the parsing of streams never take a turn of the control loop. Both ways are batched. What of
an answer's text the control loop has not taken yet waits in its call, whose size the provider bounds.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from agentrt.decoding import UNREADABLE
from agentrt.engine.control import ControlThread
from agentrt.errors import ClosedError, InputError, QueueFullError
from agentrt.models.catalog import Candidate, Catalog, Plan
from agentrt.models.chat import Completion, Sampling
from agentrt.models.context import ContextTooLongError, message_tokens, shorten
from agentrt.models.failures import FailureKind, ModelFailure
from agentrt.models.messages import (
    BadConversationError,
    Conversation,
    ModelAnswer,
    ModelRequest,
    decode_request,
    read_conversation,
)
from agentrt.models.prices import Usage, checked_usage, cost_micro_usd
from agentrt.models.provider import ModelProvider, ModelProviderFactory, ProviderCall
from agentrt.models.schema import BadSchemaError, MismatchError, Schema
from agentrt.tools.secrets import SecretAsker, SecretProvider

#: A conversation or answer above this is read in a thread of its own, so that other streams go on meanwhile.
_LARGE_BYTES: Final = 64 * 1024
_CLOSE_GRACE_S: Final = 1.0
_encode: Final = msgspec.json.encode
_decode: Final = msgspec.json.Decoder().decode


class ModelOutcome(NamedTuple):
    """How one attempt ended. ``payload`` is JSON: a `ModelAnswer`, or the failure with its ``code``. ``usage`` and
    ``cost_micro_usd`` are what it is charged; ``reported``: the provider said so itself. ``kind``: of a failure.
    ``unseen``: the attempt may have cost something that nobody has seen."""

    ok: bool
    payload: bytes
    code: str | None
    kind: FailureKind | None
    usage: Usage
    cost_micro_usd: int
    reported: bool
    unseen: bool
    retry_after_ns: int | None


Done = Callable[[ModelOutcome], None]
OnText = Callable[[str], None]


class ModelLimits(NamedTuple):
    calls_max: int = 10_000  # accepted and not ended
    calls_bytes_max: int = 256 << 20  # their requests
    request_bytes_max: int = 1 << 20
    result_bytes_max: int = 4 << 20


class ModelStatistics(NamedTuple):
    """Counters since the start, and what there is now."""

    calls: int  # attempts
    failures: int
    running: int
    running_bytes: int
    input_tokens: int
    output_tokens: int
    cost_micro_usd: int


class Planned(NamedTuple):
    """A call that may be made: what was asked for, and who may answer."""

    request: ModelRequest
    plan: Plan


class _Job:
    __slots__ = (
        "asked",
        "call",
        "cancelled",
        "candidate",
        "done",
        "ended",
        "on_text",
        "planned",
        "size",
        "task",
        "texts",
        "told",
    )

    def __init__(self, planned: Planned, candidate: Candidate, size: int, done: Done, on_text: OnText | None) -> None:
        self.planned = planned
        self.candidate = candidate
        self.size = size
        self.done = done
        self.on_text = on_text
        self.call: dict[str, Any] = {}
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.asked = False  # its provider has it
        self.ended = False
        self.texts: deque[str] = deque()
        self.told = False  # the control loop has been told of `texts`


class ModelService:
    """Made, used and closed on the control loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        factories: Mapping[str, ModelProviderFactory],
        loop: asyncio.AbstractEventLoop,
        *,
        limits: ModelLimits | None = None,
        secrets: SecretProvider | None = None,
    ) -> None:
        """``factories``: by kind of provider. A provider is made when it is first needed."""
        self.catalog: Final = catalog
        self._factories = dict(factories)
        self._limits = ModelLimits() if limits is None else limits
        self._loop = loop
        self._secrets = SecretAsker(secrets, "agentrt-model-secrets")
        self._thread: ControlThread | None = None
        self._providers: dict[str, ModelProvider] = {}  # the thread's
        self._back: deque[tuple[_Job, ModelOutcome | None]] = deque()
        self._ringing = False
        self._jobs: set[_Job] = set()
        self._bytes = 0
        self._closed = False
        self._emptied: asyncio.Event | None = None
        self._calls = self._failures = self._input_tokens = self._output_tokens = self._cost = 0

    # --- on the control loop ------------------------------------------------------------

    def plan(self, payload: bytes, *, tenant: str, tier: int, context_tokens_max: int = 2**62) -> Planned:
        """What a request of ``model.generate`` asks for, and who may answer. Raises InputError kinds."""
        if len(payload) > self._limits.request_bytes_max:
            raise InputError(
                f"the request has {len(payload)} bytes, more than {self._limits.request_bytes_max}",
                limit="limits.request_bytes_max",
            )
        try:
            request = decode_request(payload)
        except BadConversationError as error:
            raise InputError(f"model.generate: {error}") from None
        plan = self.catalog.plan(request, tenant=tenant, tier=tier, context_tokens_max=context_tokens_max)
        return Planned(request, plan)

    def call(
        self,
        planned: Planned,
        candidate: Candidate,
        *,
        key: str,
        tenant: str,
        attempt: int,
        attempts_max: int,
        done: Done,
        on_text: OnText | None = None,
    ) -> object:
        """Make one attempt with one of the plan's candidates; what is returned is good for `cancel`. ``done`` is called
        once, later, on the control loop, and not at all after `close`; ``on_text`` before it, with pieces of the
        answer's text, if the request asks for a stream. Raises QueueFullError, ClosedError."""
        if self._closed:
            raise ClosedError("the model gateway is closed")
        request, size = planned.request, planned.request.size_bytes
        limits = self._limits
        if len(self._jobs) >= limits.calls_max or self._bytes + size > limits.calls_bytes_max:
            raise QueueFullError(f"{len(self._jobs)} calls to models with {self._bytes} bytes are under way")
        job = _Job(planned, candidate, size, done, on_text if request.stream else None)
        job.call = {"key": key, "tenant": tenant, "attempt": attempt, "attempts_max": attempts_max}
        self._jobs.add(job)
        self._bytes += size
        self._calls += 1
        if self._thread is None:
            self._thread = ControlThread("agentrt-models")
            self._thread.start()
        self._thread.post(self._begin, job)
        return job

    def cancel(self, call: object) -> None:
        """Nobody wants this call any more: its connection is closed. Its outcome still comes, the real one if it was
        there already. A call that has ended is left alone."""
        if isinstance(call, _Job) and call in self._jobs and self._thread is not None:
            self._thread.post(self._cancel, call)

    def statistics(self) -> ModelStatistics:
        return ModelStatistics(
            self._calls,
            self._failures,
            len(self._jobs),
            self._bytes,
            self._input_tokens,
            self._output_tokens,
            self._cost,
        )

    async def close(self) -> None:
        """End all calls; their connections are closed. No outcome is delivered from now on."""
        if self._closed:
            return
        self._closed = True
        thread = self._thread
        if thread is None:
            return
        self._emptied = asyncio.Event()
        thread.post(self._cancel_all, [*self._jobs])
        with contextlib.suppress(TimeoutError):  # of a plugin's provider that does not heed it
            await asyncio.wait_for(self._emptied.wait(), _CLOSE_GRACE_S)
        self._secrets.close()
        await asyncio.to_thread(thread.stop)

    def _take(self) -> None:
        """What the thread has sent."""
        self._ringing = False  # before the look: who appends after it rings again
        back = self._back
        for _ in range(len(back)):
            job, outcome = back.popleft()
            if outcome is None:
                self._take_text(job)
                continue
            self._take_text(job)
            self._jobs.discard(job)
            self._bytes -= job.size
            self._failures += not outcome.ok
            self._input_tokens += outcome.usage.input_tokens
            self._output_tokens += outcome.usage.output_tokens
            self._cost += outcome.cost_micro_usd
            if not self._closed:
                job.done(outcome)

    def _take_text(self, job: _Job) -> None:
        job.told = False  # before the look, as above
        texts = job.texts
        pieces = []
        while texts:
            pieces.append(texts.popleft())
        if pieces and job.on_text is not None and not self._closed:
            job.on_text("".join(pieces))

    # --- on the models thread -----------------------------------------------------------

    def _begin(self, job: _Job) -> None:
        if job.cancelled:
            self._send(job, _failed(job, _NOT_BEGUN))
            return
        job.task = asyncio.get_running_loop().create_task(self._work(job))
        job.task.add_done_callback(partial(self._worked, job))

    def _cancel(self, job: _Job) -> None:
        job.cancelled = True
        if job.task is not None:
            job.task.cancel()

    def _cancel_all(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._cancel(job)
        asyncio.get_running_loop().create_task(self._close_providers(jobs)).add_done_callback(self._keep)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        """Has the loop hold the task until it is over."""
        task.exception()

    async def _close_providers(self, jobs: list[_Job]) -> None:
        await asyncio.gather(*(job.task for job in jobs if job.task is not None), return_exceptions=True)
        for provider in self._providers.values():
            with contextlib.suppress(Exception):
                await provider.close()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._all_ended)

    def _all_ended(self) -> None:
        if self._emptied is not None:
            self._emptied.set()

    def _worked(self, job: _Job, task: "asyncio.Task[None]") -> None:
        if job.ended:
            return
        if task.cancelled():
            outcome = _failed(job, _CANCELLED if job.asked else _NOT_BEGUN)
        else:  # of a provider that is a plugin's, or a bug of ours: its text may hold anything
            what = f"provider {job.candidate.model.provider} raised {type(task.exception()).__name__}"
            outcome = _failed(job, ModelFailure(FailureKind.FATAL, "model_provider", what, unseen=True))
        self._send(job, outcome)

    def _send(self, job: _Job, outcome: ModelOutcome | None) -> None:
        if outcome is not None:
            job.ended = True
        self._back.append((job, outcome))
        if not self._ringing:
            self._ringing = True
            with contextlib.suppress(RuntimeError):  # the control loop is closed
                self._loop.call_soon_threadsafe(self._take)

    def _on_text(self, job: _Job, text: str) -> None:
        job.texts.append(text)
        if not job.told:
            job.told = True
            self._send(job, None)

    async def _work(self, job: _Job) -> None:
        try:
            outcome = await self._generate(job)
        except ModelFailure as failure:
            outcome = _failed(job, failure)
        self._send(job, outcome)

    async def _generate(self, job: _Job) -> ModelOutcome:
        candidate, plan, request = job.candidate, job.planned.plan, job.planned.request
        prepare = partial(_prepared, request, plan, candidate)
        conversation, schema = await asyncio.to_thread(prepare) if job.size > _LARGE_BYTES else prepare()
        provider = self._provider(candidate.model.provider)
        sampling = Sampling(candidate.reserved.output_tokens, request.tool_choice, request.temperature, request.stop)
        job.asked = True
        completion = await provider.generate(
            ProviderCall(
                candidate.model.model or candidate.name,
                candidate.model,
                conversation,
                schema,
                sampling,
                on_text=partial(self._on_text, job) if job.on_text is not None else None,
                **job.call,
            )
        )
        finish = partial(_finished, job, completion, schema, self._limits.result_bytes_max)
        return await asyncio.to_thread(finish) if completion.output_bytes > _LARGE_BYTES else finish()

    def _provider(self, name: str) -> ModelProvider:
        provider = self._providers.get(name)
        if provider is None:
            config = self.catalog.providers[name]
            provider = self._providers[name] = self._factories[config.kind](name, config, self._secrets)
        return provider


_CANCELLED: Final = ModelFailure(FailureKind.FATAL, "cancelled", "nobody wanted the answer any more", unseen=True)
_NOT_BEGUN: Final = ModelFailure(FailureKind.FATAL, "cancelled", "nobody wanted the answer any more")


def _prepared(request: ModelRequest, plan: Plan, candidate: Candidate) -> tuple[Conversation, Schema | None]:
    """What is sent. Raises ModelFailure."""
    try:
        conversation = read_conversation(request)
        schema = None if conversation.schema is None else Schema(conversation.schema)
    except (BadConversationError, BadSchemaError) as error:
        raise ModelFailure(FailureKind.FATAL, "bad_request", f"model.generate: {error}") from None
    if not plan.context:
        return conversation, schema
    model = candidate.model
    fixed = len(request.tools) + len(request.schema)
    room = min(model.context_tokens - candidate.reserved.output_tokens, plan.context_tokens_max)
    room -= -(-fixed // model.token_bytes)
    try:
        kept = shorten(
            conversation.messages, room, plan.context, lambda message: message_tokens(message, model.token_bytes)
        )
    except ContextTooLongError as error:
        raise ModelFailure(FailureKind.FATAL, "model_context", str(error)) from None
    return Conversation(kept, conversation.tools, conversation.schema), schema


def _finished(job: _Job, completion: Completion, schema: Schema | None, result_bytes_max: int) -> ModelOutcome:
    """The answer, checked and priced. Raises ModelFailure."""
    candidate = job.candidate
    usage, reported = checked_usage(
        completion.usage,
        reserved=candidate.reserved,
        text_bytes=completion.output_bytes,
        context_tokens=candidate.model.context_tokens,
    )
    cost = cost_micro_usd(candidate.model, usage)
    data = None
    text = completion.text
    try:
        if schema is not None and not completion.tool_calls and completion.finish != "filter":
            data = _checked(text, schema, completion.finish)
        answer = ModelAnswer(text, completion.finish, candidate.name, usage, cost, tuple(completion.tool_calls), data)
        payload = _encode(answer)
        if len(payload) > result_bytes_max:
            raise ModelFailure(
                FailureKind.CONFLICT,
                "model_too_big",
                f"the answer has {len(payload)} bytes, more than {result_bytes_max}",
            )
    except ModelFailure as failure:
        payload = _encode(failure.to_dict())
        return ModelOutcome(False, payload, failure.code, failure.kind, usage, cost, reported, False, None)
    return ModelOutcome(True, payload, None, None, usage, cost, reported, False, None)


_SHOWN_CHARS: Final = 2_000


def _checked(text: str | None, schema: Schema, finish: str) -> Any:
    """The answer as what its schema says. Raises ModelFailure."""
    try:
        data = _decode(text or "")
        schema.check(data)
    except (*UNREADABLE, MismatchError) as error:
        what = "was cut at its longest output" if finish == "length" else str(error)
        raise ModelFailure(
            FailureKind.CONFLICT,
            "model_schema",
            f"the answer does not keep to the schema: {what}",
            details={"text": (text or "")[:_SHOWN_CHARS]},
        ) from None
    return data


def _failed(job: _Job, failure: ModelFailure) -> ModelOutcome:
    candidate = job.candidate
    usage, reported = Usage(), False
    if failure.usage is not None:
        usage, reported = checked_usage(
            failure.usage, reserved=candidate.reserved, text_bytes=0, context_tokens=candidate.model.context_tokens
        )
    elif failure.unseen:  # nobody knows what it cost: no more than what was reserved
        usage = candidate.reserved
    return ModelOutcome(
        False,
        _encode(failure.to_dict()),
        failure.code,
        failure.kind,
        usage,
        cost_micro_usd(candidate.model, usage),
        reported,
        failure.unseen,
        failure.retry_after_ns,
    )
