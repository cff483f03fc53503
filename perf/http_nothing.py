"""The baseline of perf.http: the node's server and framework, and an endpoint that does nothing. Prints its port."""

import threading

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrt.http.server import HttpServer, listen
from agentrt.http.types import Accepted, RunRequest

_decode = msgspec.json.Decoder(RunRequest).decode
_encode = msgspec.json.Encoder().encode


async def start(request: Request) -> Response:
    _decode(await request.body())
    answer = Accepted(run_id="run_01ARZ3NDEKTSV4RRFFQ69G5FAV", location="/v1/runs/run_01ARZ3NDEKTSV4RRFFQ69G5FAV")
    return Response(_encode(answer), 202, {"location": answer.location}, "application/json")


if __name__ == "__main__":
    server = HttpServer(Starlette(routes=[Route("/v1/runs", start, methods=["POST"])]), listen("127.0.0.1", 0))
    server.start()
    print(server.address[1], flush=True)
    threading.Event().wait()
