"""What keeps a host's code inside: landlock for files, seccomp for system calls, rlimits for resources.

A template confines itself before it imports an agent's module, with a filter that still lets it fork; a host adds the
strict one. Both filters list what is allowed: reading what is open or may be opened for reading, memory, clocks,
waiting, signals to oneself. Everything else fails with EPERM: sockets, processes, threads, ptrace, signals to others.
Files open for reading only, and only those of the interpreter, of installed packages, the code on sys.path, the bundle.

Nothing here degrades: what the kernel lacks raises SandboxError.
"""

import ctypes
import errno
import os
import platform
import resource
import site
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agentrt.errors import AgentrtError


class SandboxError(AgentrtError):
    """The kernel, or a filter around this process, lacks what confines hosts."""

    code = "sandbox"


_libc: Final = ctypes.CDLL(None, use_errno=True)

# --- landlock -------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all machines
_RULE_PATH_BENEATH: Final = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
#: Rights that each ABI can withhold: files (by ABI 1, 2, 3, 5), TCP (4), abstract sockets and signals (6).
_FILES_BY_ABI: Final = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
_TCP: Final = 0b11
_SCOPES: Final = 0b11
#: Of a code folder on sys.path; more are not looked at.
_CODE_ENTRIES_MAX: Final = 2_000

_SYSTEM_PATHS: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null"),
)


def readable_paths(bundle: Iterable[Path]) -> dict[str, int]:
    """What a host may read: path -> rights."""
    everything = _READ_FILE | _READ_DIR
    paths = dict.fromkeys(_SYSTEM_PATHS, everything)
    interpreter = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    interpreter.update(site.getsitepackages())
    for path in interpreter:
        if path not in ("", "/"):
            paths[path] = everything
    for entry in sys.path:
        if not any(entry == path or entry.startswith(path + "/") for path in interpreter):
            paths |= code_in(Path(entry))
    for own in bundle:
        paths[str(own)] = everything if own.is_dir() else _READ_FILE
    return paths


def code_in(folder: Path) -> dict[str, int]:
    """Modules and packages right in a folder, whose other files are none of an agent's business."""
    if not folder.is_dir():
        return {str(folder): _READ_FILE} if folder.is_file() else {}  # a zip file
    out = {str(folder): _READ_DIR}
    for count, each in enumerate(sorted(folder.iterdir())):
        if count >= _CODE_ENTRIES_MAX:
            break
        if each.suffix in (".py", ".so", ".pyc"):
            out[str(each)] = _READ_FILE
        elif (each / "__init__.py").is_file():
            out[str(each)] = _READ_FILE | _READ_DIR
    return out


def restrict_files(paths: dict[str, int]) -> int:
    """From now on this process and what it forks can open these for reading, and nothing else. Returns the ABI."""
    abi = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        raise SandboxError(
            f"landlock is not available: {os.strerror(ctypes.get_errno())}",
            hint="Boot with lsm=landlock,… on Linux 5.13 or later",
        )
    files = 0
    for since, rights in _FILES_BY_ABI.items():
        files |= rights if abi >= since else 0
    fields = [files, *([_TCP] if abi >= 4 else []), *([_SCOPES] if abi >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise _failed("landlock_create_ruleset")
    try:
        for path, rights in paths.items():
            _allow(ruleset, path, rights)
        _no_new_privileges()
        if _libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
            raise _failed("landlock_restrict_self")
    finally:
        os.close(ruleset)
    return int(abi)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there: nothing to read
    try:
        if not os.path.isdir(path):
            rights &= ~_READ_DIR
        rule = struct.pack("=Qi", rights, fd)
        if _libc.syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint32(0)):
            raise _failed("landlock_add_rule")
    finally:
        os.close(fd)


def _no_new_privileges() -> None:
    if _libc.prctl(38, 1, 0, 0, 0):
        raise _failed("PR_SET_NO_NEW_PRIVS")


def _failed(what: str) -> SandboxError:
    return SandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")


# --- seccomp ----------------------------------------------------------------------------------

_X86_64, _AARCH64 = 0xC000003E, 0xC00000B7
_MACHINES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}
_X32_BIT: Final = 0x4000_0000

#: Number on x86_64, on aarch64 (None: there is no such call).
_ALWAYS: Final[dict[str, tuple[int | None, int | None]]] = {
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "close": (3, 57),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "lseek": (8, 62),
    "getdents64": (217, 61),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "statx": (332, 291),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "arch_prctl": (158, None),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getcpu": (309, 168),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getrlimit": (97, 163),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getcwd": (79, 17),
    "getrandom": (318, 278),
    "dup": (32, 23),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "recvfrom": (45, 207),
    "sendto": (44, 206),
    "getsockopt": (55, 209),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "shutdown": (48, 210),
    "fadvise64": (221, 223),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "getgroups": (115, 158),
    "getpriority": (140, 141),
}
#: What a template needs besides, to fork hosts and to confine them.
_FORKING: Final[dict[str, tuple[int | None, int | None]]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "pidfd_open": (434, 434),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "setrlimit": (160, 164),
    "setsid": (112, 157),
    "dup2": (33, None),
    "dup3": (292, 24),
    "close_range": (436, 436),
}
_KILL: Final = (62, 129)
_TGKILL: Final = (234, 131)
_IOCTL: Final = (16, 29)
_FCNTL: Final = (72, 25)
_PRLIMIT: Final = (302, 261)
_OPENAT: Final = (257, 56)
_OPEN: Final = (2, None)
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_CLONE_THREAD: Final = 0x0001_0000
_IOCTLS: Final = (0x5401, 0x5413, 0x5451, 0x5450)  # TCGETS, TIOCGWINSZ, FIOCLEX, FIONCLEX
_FCNTLS: Final = (0, 1, 2, 3, 1030)  # DUPFD, GETFD, SETFD, GETFL, DUPFD_CLOEXEC; not SETFL, SETOWN, SETSIG
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# struct seccomp_data: nr at 0, arch at 4, args at 16, 8 bytes each; low half first on both machines.
_NR, _ARCH = 0, 4
_LOAD, _JUMP_EQUAL, _JUMP_SET, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _DENY, _NOT_BUILT_IN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_KILL_PROCESS: Final = 0x80000000

_Instruction = tuple[int, int, int, int]


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index)


def filter_program(machine: str, pid: int, forking: bool) -> list[_Instruction]:
    """The filter for a process: (code, jump if true, jump if false, operand). Raises SandboxError."""
    if machine not in _MACHINES:
        raise SandboxError(f"there is no list of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    program: list[_Instruction] = [
        *((_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, _MACHINES[machine]), (_RETURN, 0, 0, _KILL_PROCESS)),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _DENY)]

    def rule(numbers: tuple[int | None, int | None], body: list[_Instruction]) -> None:
        """If it is this call: the body, which returns in each branch."""
        number = numbers[column]
        if number is not None:
            program.extend([(_JUMP_EQUAL, 0, len(body), number), *body])

    def one_of(index: int, values: tuple[int, ...]) -> list[_Instruction]:
        count = len(values)
        tests = [(_JUMP_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
        return [_argument(index), *tests, (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]

    allowed = _ALWAYS | _FORKING if forking else _ALWAYS
    for numbers in allowed.values():
        rule(numbers, [(_RETURN, 0, 0, _ALLOW)])
    for numbers, index in ((_OPENAT, 2), (_OPEN, 1)):
        reading = [(_JUMP_SET, 0, 1, _WRITING), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
        rule(numbers, [_argument(index), *reading])
    rule(_IOCTL, one_of(1, _IOCTLS))
    rule(_FCNTL, one_of(1, _FCNTLS))
    rule(_PRLIMIT, one_of(0, (0, pid)))
    if forking:
        no_thread = [(_JUMP_SET, 0, 1, _CLONE_THREAD), (_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
        rule(_CLONE, [_argument(0), *no_thread])
    else:
        rule(_KILL, one_of(0, (pid,)))
        rule(_TGKILL, one_of(0, (pid,)))
    rule(_CLONE3, [(_RETURN, 0, 0, _NOT_BUILT_IN)])  # the C library falls back to clone, whose flags a filter sees
    program.append((_RETURN, 0, 0, _DENY))
    return program


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def restrict_calls(*, forking: bool) -> None:
    """Put the filter on this process for good. Raises SandboxError."""
    program = filter_program(platform.machine(), os.getpid(), forking)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    _no_new_privileges()
    if _libc.prctl(22, 2, ctypes.byref(_Program(len(program), ctypes.addressof(packed))), 0, 0):
        raise _failed("PR_SET_SECCOMP")


# --- rlimits -----------------------------------------------------------------------------------

#: Address space beyond the data: mappings of files, and what allocators reserve without using it.
_ADDRESS_SPACE_EXTRA: Final = 4 << 30
_FILES_MAX: Final = 256


def limit_resources(memory_bytes_max: int) -> None:
    """Bound this process's memory (0: not), files and core dumps; it cannot raise the bounds again."""
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: _FILES_MAX}
    if memory_bytes_max:
        limits[resource.RLIMIT_DATA] = memory_bytes_max
        limits[resource.RLIMIT_AS] = memory_bytes_max + _ADDRESS_SPACE_EXTRA
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
