"""A power cut for files written under dropwrites.c: what was never synced may not be there.

A disk keeps sectors, not writes. For each file the log gives, per sector written since its last sync, what the sector
held then. At the cut each extent of unsynced sectors is kept, lost, or torn (some sectors of it kept), as a seed says.
"""

import os
import random
import shutil
import struct
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

SECTOR: Final = 512
SHIM_SOURCE: Final = Path(__file__).with_name("dropwrites.c")

_ENTRY: Final = struct.Struct("=IIQQQQQ")
_WRITE, _SYNC, _DURABLE = 1, 2, 3

#: ``lose``: everything unsynced is lost, the worst that code without syncs can meet. ``mix``: any subset survives.
Policy = Literal["lose", "mix"]


def build_shim(folder: Path) -> Path | None:
    """The shim as a shared library; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    library = folder / "dropwrites.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(SHIM_SOURCE), "-o", str(library), "-ldl", "-lpthread"], check=True)
    return library


def shim_environment(library: Path, folder: Path, log: Path) -> dict[str, str]:
    """Environment of a process whose writes under ``folder`` (which exists) are logged to ``log``."""
    watch = {"LD_PRELOAD": str(library), "DROPWRITES_DIR": str(folder), "DROPWRITES_LOG": str(log)}
    return dict(os.environ) | watch


@dataclass
class _Unsynced:
    """One file: what its unsynced sectors held, with the log position of the write, and its size at the last sync."""

    sectors: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    size: tuple[int, int] | None = None  # (log position, bytes)


def cut_power(log: Path, seed: int, policy: Policy = "mix") -> int:
    """Does to the files what a power cut might have done, and empties the log. Call it when the process that wrote is
    dead. How many sectors lost what had been written."""
    rng = random.Random(seed)
    lost = 0
    for path, unsynced in sorted(_read_log(log).items()):
        if path.exists() and (unsynced.sectors or unsynced.size):
            lost += _cut_file(path, unsynced, rng, policy)
    log.unlink(missing_ok=True)
    return lost


def _read_log(log: Path) -> dict[Path, _Unsynced]:
    files: dict[Path, _Unsynced] = {}
    data = log.read_bytes() if log.exists() else b""
    at = 0
    while at + _ENTRY.size <= len(data):
        kind, path_bytes, offset, length, file_bytes, old_bytes, upto = _ENTRY.unpack_from(data, at)
        body = at + _ENTRY.size
        end = body + path_bytes + old_bytes
        if end > len(data):
            break  # killed while logging: the write itself never began
        file = files.setdefault(Path(os.fsdecode(data[body : body + path_bytes])), _Unsynced())
        old = data[body + path_bytes : end]
        if kind == _WRITE:
            _note_write(file, at, offset, length, file_bytes, old)
        elif kind == _SYNC:
            file.sectors = {n: kept for n, kept in file.sectors.items() if kept[0] >= upto}
            if file.size is not None and file.size[0] < upto:
                file.size = None
        else:
            for sector in range(-(-offset // SECTOR), (offset + length) // SECTOR):
                file.sectors.pop(sector, None)
            _note_durable_parts(file, offset, length)
        at = end
    return files


def _note_write(file: _Unsynced, at: int, offset: int, length: int, file_bytes: int, old: bytes) -> None:
    if file.size is None and offset + length > file_bytes:
        file.size = (at, file_bytes)
    for sector in range(offset // SECTOR, -(-(offset + length) // SECTOR)):
        if sector in file.sectors:
            continue  # what it held at the last sync is known
        start = sector * SECTOR
        # Only the part inside the write is in the log; the rest of the sector is what the file holds today, for
        # nobody wrote it since (or the sector would be known).
        low, high = max(start, offset), min(start + SECTOR, offset + length)
        piece = old[low - offset : high - offset].ljust(high - low, b"\0")
        file.sectors[sector] = (at, struct.pack("=HH", low - start, high - start) + piece)


def _note_durable_parts(file: _Unsynced, offset: int, length: int) -> None:
    """Sectors that a durable write covers in part: a disk writes whole sectors, so all of it is durable."""
    for sector in (offset // SECTOR, (offset + length - 1) // SECTOR):
        file.sectors.pop(sector, None)
    if file.size is not None and offset + length > file.size[1]:
        file.size = (file.size[0], offset + length)


def _cut_file(path: Path, unsynced: _Unsynced, rng: random.Random, policy: Policy) -> int:
    lost = _choose(sorted(unsynced.sectors), rng, policy)
    with path.open("r+b") as file:
        for sector in lost:
            low, high = struct.unpack_from("=HH", unsynced.sectors[sector][1])
            file.seek(sector * SECTOR + low)
            file.write(unsynced.sectors[sector][1][4 : 4 + high - low])
        if unsynced.size is not None:
            kept = set(unsynced.sectors) - set(lost)
            size = max([unsynced.size[1], *[(sector + 1) * SECTOR for sector in kept]])
            now = path.stat().st_size
            if size < now and (policy == "lose" or rng.random() < 0.5):
                file.truncate(size)
    return len(lost)


def _choose(sectors: list[int], rng: random.Random, policy: Policy) -> list[int]:
    """The sectors that are lost. Neighbours share a fate, unless they are torn."""
    if policy == "lose":
        return sectors
    lost: list[int] = []
    share = rng.choice((0.1, 0.5, 0.9))
    for page in sorted({sector // 8 for sector in sectors}):
        inside = [sector for sector in sectors if sector // 8 == page]
        if rng.random() < 0.2:
            lost += [sector for sector in inside if rng.random() < 0.5]
        elif rng.random() < share:
            lost += inside
    return lost
