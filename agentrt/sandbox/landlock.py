"""Landlock's rights by ABI, and what its system calls are given."""

import struct
from typing import Final

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all machines
RULE_PATH_BENEATH: Final = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
#: Rights that a rule for a file may have; the others are for folders.
OF_FILES: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

#: Rights that each ABI can withhold: files (by ABI 1, 2, 3, 5), TCP (4), abstract sockets and signals (6).
_FILES_BY_ABI: Final = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_TCP: Final = 0b11
_SCOPES: Final = 0b11


def file_rights(abi: int) -> int:
    """All rights over files that this ABI knows."""
    files = 0
    for since, rights in _FILES_BY_ABI.items():
        files |= rights if abi >= since else 0
    return files


def tcp_rights(abi: int) -> int:
    return _TCP if abi >= 4 else 0


def scopes(abi: int) -> int:
    """Abstract unix sockets and signals, of processes outside."""
    return _SCOPES if abi >= 6 else 0


def attributes(abi: int) -> bytes:
    """struct landlock_ruleset_attr that withholds everything the ABI knows."""
    fields = [
        file_rights(abi),
        *([tcp_rights(abi)] if abi >= 4 else []),
        *([scopes(abi)] if abi >= 6 else []),
    ]
    return struct.pack(f"={len(fields)}Q", *fields)


def path_rule(rights: int, fd: int) -> bytes:
    """struct landlock_path_beneath_attr."""
    return struct.pack("=Qi", rights, fd)
