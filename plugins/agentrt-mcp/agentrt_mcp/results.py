"""What a server answered, as the outcome of a step. Pure."""

from typing import Any, Final, NamedTuple

import mcp_types as types
from mcp.shared.exceptions import MCPError

from agentrt.tools.binding import encode_result, error_payload
from agentrt_mcp.schemas import Validator, misfit

#: Of our own transport; see `agentrt_mcp.http`.
HTTP_FAILED: Final = -32950


class Answer(NamedTuple):
    """``unknown``: nobody knows whether the call had its effect. ``lost``: so is its session."""

    ok: bool
    payload: bytes
    code: str | None = None
    unknown: bool = False
    lost: bool = False


def failed(code: str, message: str, *, unknown: bool = False, lost: bool = False, **more: Any) -> Answer:
    return Answer(False, error_payload(code, message, more or None), code, unknown, lost)


def answered(
    result: types.CallToolResult | types.InputRequiredResult, validator: Validator | None, bytes_max: int
) -> Answer:
    """``{"content": […], "structured": …}``, the blocks as MCP has them, and the member only if the tool has
    structured results; or the failure that it is."""
    if isinstance(result, types.InputRequiredResult):
        return failed("tool_failed", "the server asks for input in the middle of the call, which a step cannot give")
    told = result.model_dump(mode="json", by_alias=True, exclude_none=True, include={"content", "structured_content"})
    content = told.get("content", [])
    if result.is_error:
        texts = [block["text"] for block in content if block.get("type") == "text"]
        return failed("tool_failed", "\n".join(texts) or "the tool failed and did not say why")
    value: dict[str, Any] = {"content": content}
    if "structuredContent" in told:
        value["structured"] = told["structuredContent"]
    if validator is not None:
        if "structured" not in value:
            return failed("tool_result", "the tool has a schema for its results, and returned nothing structured")
        if wrong := misfit(validator, value["structured"]):
            return failed("tool_result", f"the result does not fit the tool's schema: {wrong}")
    payload, code = encode_result(value, bytes_max)
    return Answer(code is None, payload, code)


def refused(error: MCPError, mark: str) -> Answer:
    """An error instead of a result. ``mark``: what our own transport's errors carry, and no server knows."""
    code, message, data = error.error.code, error.error.message, error.error.data
    if code == HTTP_FAILED and isinstance(data, dict) and data.get("mark") == mark:
        return _by_status(int(data["status"]), str(data["reason"]), data.get("retry_after_s"))
    if code == types.CONNECTION_CLOSED:
        return failed("tool_host_died", f"the server went away before it answered: {message}", unknown=True)
    if code == types.INVALID_REQUEST and message == "Session terminated":
        return failed("tool_unavailable", "the server has forgotten the session", lost=True)
    if code == types.INVALID_PARAMS:
        return failed("tool_args", f"the server refuses the arguments: {message}")
    if code == types.PARSE_ERROR:
        return failed("tool_result", f"the server's answer cannot be read: {message}", unknown=True)
    return failed("tool_failed", f"{message} (MCP error {code})")


def _by_status(status: int, reason: str, retry_after_s: float | None) -> Answer:
    match status:
        case 0:  # it was never sent
            return failed("tool_unavailable", f"the server cannot be reached: {reason}")
        case 1:
            return failed("tool_host_died", f"the connection broke before the answer: {reason}", unknown=True)
        case 429:
            if retry_after_s is None:
                return failed("tool_rate_limited", f"the server says {reason}")
            return failed("tool_rate_limited", f"the server says {reason}", retry_after_s=retry_after_s)
        case 503:
            return failed("tool_unavailable", f"the server says {reason}")
        case 502 | 504:  # a proxy says so, of a server that may have had it
            return failed("tool_host_died", f"a proxy says {reason}", unknown=True)
    return failed("tool_failed", f"the server says {reason}")
