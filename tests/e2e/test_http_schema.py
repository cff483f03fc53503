"""What the OpenAPI document says is so: requests made from it get answers that it describes, and never a 5xx."""

import os
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_http_api import Served, served  # noqa: F401 (the fixture)

#: Requests of each kind; bounded in the suite, a longer look sets it higher.
EXAMPLES: Final = int(os.environ.get("AGENTRT_SCHEMA_EXAMPLES", "12"))
#: What would end the node for the others, or never ends by itself.
LEFT_OUT: Final = {("POST", "/v1/drain"), ("GET", "/v1/runs/{run_id}/events"), ("GET", "/v1/live")}


@pytest.fixture(scope="module")
def document(served: Served) -> Any:  # noqa: F811
    return served.admin.get("/v1/openapi.json").json()


def operations(document: Any) -> list[Any]:
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


def test_the_document_is_openapi(document: Any) -> None:
    assert document["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(document).validate()
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) >= 20


@pytest.mark.timeout(600)
def test_answers_are_as_the_document_says(served: Served, document: Any) -> None:  # noqa: F811
    base = str(served.admin.base_url)
    headers = {"authorization": served.admin.headers["authorization"]}
    run_id = served.admin.post("/v1/runs", json={"agent": "greet", "input": "x"}).json()["run_id"]
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    for operation in operations(document):
        if (operation.method.upper(), operation.path) in LEFT_OUT:
            continue

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(), there=st.booleans())
        def check(case: Any, there: bool) -> None:
            if there and "run_id" in (case.path_parameters or {}):
                case.path_parameters["run_id"] = run_id
            case.validate_response(case.call(base_url=base, headers=headers, timeout=60), checks=checks)

        check()
