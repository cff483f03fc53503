"""Files in which runs travel."""

import io
from hashlib import blake2b

from agentrt.errors import ExportFileError
from agentrt.transfer.format import DIGEST_BYTES, ExportReader, ExportWriter

from .kit import target


@target()
def export_frames(data: bytes) -> None:
    """The frames of a file whose digest is right: whole runs that fold, or refused."""
    end = b"\xff" + DIGEST_BYTES.to_bytes(8, "big") + blake2b(data, digest_size=DIGEST_BYTES).digest()
    try:
        reader = ExportReader(io.BytesIO(data + end))
        modules, runs, states = [*reader.modules()], [*reader.runs()], [*reader.states()]
    except ExportFileError:
        return
    made = io.BytesIO()
    writer = ExportWriter(made, reader.header)
    for version, kept in modules:
        writer.module(version, kept)
    for run in runs:
        assert run.run.version == len(run.records)
        writer.run(run.run_id, run.records, run.rows)
    for state in states:
        writer.state(*state)
    writer.seal()
    again = ExportReader(made)
    assert [*again.modules()] == modules and [*again.states()] == states
    assert [(run.run_id, run.records, run.rows) for run in again.runs()] == [
        (run.run_id, run.records, run.rows) for run in runs
    ]


@target()
def export_file(data: bytes) -> None:
    """Any file: refused, or one whose digest is right."""
    try:
        reader = ExportReader(io.BytesIO(data))
        for _ in reader.modules():
            pass
        for _ in reader.runs():
            pass
        for _ in reader.states():
            pass
    except ExportFileError:
        return
