"""What decision 0012 chose against: the endpoint of `perf.http_nothing` in litestar, on the same server. Prints its
port."""

import threading

from litestar import Litestar, Response, post

from agentrt.http.server import HttpServer, listen
from agentrt.http.types import Accepted, RunRequest


@post("/v1/runs", status_code=202)
async def start(data: RunRequest) -> Response[Accepted]:
    answer = Accepted(run_id="run_01ARZ3NDEKTSV4RRFFQ69G5FAV", location="/v1/runs/run_01ARZ3NDEKTSV4RRFFQ69G5FAV")
    return Response(answer, headers={"location": answer.location})


if __name__ == "__main__":
    app = Litestar(route_handlers=[start], openapi_config=None, logging_config=None)
    server = HttpServer(app, listen("127.0.0.1", 0))  # type: ignore[arg-type]
    server.start()
    print(server.address[1], flush=True)
    threading.Event().wait()
