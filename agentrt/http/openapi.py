"""The OpenAPI 3.1 document, made from the table of endpoints and their types."""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from agentrt.http.endpoint import Endpoint
from agentrt.http.problems import MEDIA_TYPE
from agentrt.http.types import Problem

_PARAMETER: Final = re.compile(r"\{(\w+)\}")
#: What any endpoint may answer beside what it is for.
_PROBLEMS: Final = {
    "400": "The request cannot be read.",
    "401": "There is no API key that is known here.",
    "403": "The key may not do that.",
    "404": "There is nothing of that name, or it is not this key's.",
    "408": "The body did not come in time.",
    "409": "It contradicts what is there already.",
    "413": "The body is too large.",
    "415": "The body is of another type.",
    "422": "The request is understood and wrong.",
    "429": "A bounded queue is full; see Retry-After.",
    "500": "The node has a fault; its log says which.",
    "503": "The node does not take this now; see Retry-After.",
    "507": "The store is full.",
}


def document(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The document as plain data."""
    endpoints = list(endpoints)
    types = [kind for e in endpoints for kind in (e.answer, e.body) if kind is not None] + [Problem]
    unique = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentrt", "version": version, "description": "Runs of agents on one node."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "agentrt_ID_SECRET"}},
        },
    }


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {str(endpoint.status): _response(endpoint, schema_of)}
    if endpoint.path == "/v1/runs" and endpoint.method == "POST":
        from agentrt.http.types import Run

        responses["200"] = {
            "description": "It has ended while the caller waited.",
            "content": {"application/json": {"schema": schema_of[Run]}},
        }
    problem = {"content": {MEDIA_TYPE: {"schema": schema_of[Problem]}}}
    for status, about in _PROBLEMS.items():
        responses.setdefault(status, {"description": about} | problem)
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.handler.__self__.__class__.__name__.lower()}_{endpoint.handler.__name__}",  # type: ignore[attr-defined]
        "description": endpoint.about,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in _PARAMETER.findall(endpoint.path)
            ),
            *(
                {"name": p.name, "in": p.where, "description": p.about, "schema": {"type": p.kind}}
                for p in endpoint.parameters
            ),
        ],
        "responses": responses,
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": not endpoint.body_optional,
            "content": {"application/json": {"schema": schema_of[endpoint.body]}},
        }
    if endpoint.scope is not None:
        operation["security"] = [{"key": [endpoint.scope]}]
    return operation


def _response(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if endpoint.answer is None:
        if endpoint.media_type == "application/json":
            return {"description": "Done."}
        return {"description": "A stream.", "content": {endpoint.media_type: {"schema": {"type": "string"}}}}
    return {"description": "As asked.", "content": {endpoint.media_type: {"schema": schema_of[endpoint.answer]}}}
