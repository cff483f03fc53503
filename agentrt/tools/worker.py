"""A worker: a child of a tool host that runs sync tools, one job at a time, on its main thread.

It is forked from the host's forker, so it has what the host had before its loop began. The host ends it when a job
overruns; nothing else is touched by that.
"""

import atexit
import os
import socket
import sys
from typing import NoReturn

import msgspec

from agentrt.spawn import die_with_parent
from agentrt.tools.binding import Binding
from agentrt.tools.execution import Stop, execute, execute_batch, run_to_end
from agentrt.tools.loading import Loader
from agentrt.tools.protocol import RECEIVE_BYTES, FrameReader, Job, Loaded, Reply, encode_frame


def serve_jobs(sock: socket.socket, forker_pid: int, result_bytes_max: int) -> NoReturn:
    """Serve the host's jobs until it closes the socket."""
    os.setpgid(0, 0)
    die_with_parent(forker_pid)
    status = 0
    try:
        _serve(sock, result_bytes_max)
    except OSError:  # the host is gone
        status = 1
    except BaseException:  # not one of a tool
        status = 1
        sys.excepthook(*sys.exc_info())
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End without waiting for threads, which may never end; but exit handlers run and files are flushed."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(status)


def _serve(sock: socket.socket, result_bytes_max: int) -> None:
    sock.setblocking(True)
    reader = FrameReader()
    decoder = msgspec.msgpack.Decoder(Job)
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    loader = Loader()
    bindings: dict[int, Binding | tuple[bytes, str]] = {}
    while count := sock.recv_into(buffer):
        for body in reader.feed(buffer[:count]):
            job = decoder.decode(body)
            number = job.tool.number
            binding = bindings.get(number)
            if binding is None:
                binding = bindings[number] = loader.load(job.tool)
                sock.sendall(encode_frame(Loaded(number)))
            if isinstance(binding, tuple):
                replies = [Reply(call.id, *binding, 0) for call in job.calls]
            elif len(job.calls) == 1:
                replies = [run_to_end(execute(binding, job.calls[0], Stop(), result_bytes_max))]
            else:
                replies = run_to_end(execute_batch(binding, job.calls, Stop(), result_bytes_max))
            sock.sendall(encode_frame(replies))
