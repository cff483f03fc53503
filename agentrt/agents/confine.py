"""What keeps a host's code inside: landlock for files, seccomp for system calls, rlimits for resources.

A template confines itself before it imports an agent's module, with a filter that still lets it fork; a host adds the
strict one. Both filters list what is allowed: reading what is open or may be opened for reading, memory, clocks,
waiting, signals to oneself. Everything else fails with EPERM: sockets, processes, threads, ptrace, signals to others.
Files open for reading only, and only those of the interpreter, of installed packages, the code on sys.path, the bundle.

Nothing here degrades: what the kernel lacks raises SandboxError.
"""

import ctypes
import os
import platform
import resource
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agentrt.sandbox import SandboxError, landlock, seccomp
from agentrt.sandbox.landlock import READ_DIR, READ_FILE
from agentrt.sandbox.seccomp import ALLOW, DENY, NOT_BUILT_IN, Filter, Instruction, any_bit, one_of, verdict

_libc: Final = ctypes.CDLL(None, use_errno=True)

# --- landlock -------------------------------------------------------------------------------

#: Of a code folder on sys.path; more are not looked at.
_CODE_ENTRIES_MAX: Final = 2_000

_SYSTEM_PATHS: Final = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null"),
)


def readable_paths(bundle: Iterable[Path]) -> dict[str, int]:
    """What a host may read: path -> rights."""
    everything = READ_FILE | READ_DIR
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
        paths[str(own)] = everything if own.is_dir() else READ_FILE
    return paths


def code_in(folder: Path) -> dict[str, int]:
    """Modules and packages right in a folder, whose other files are none of an agent's business."""
    if not folder.is_dir():
        return {str(folder): READ_FILE} if folder.is_file() else {}  # a zip file
    out = {str(folder): READ_DIR}
    for count, each in enumerate(sorted(folder.iterdir())):
        if count >= _CODE_ENTRIES_MAX:
            break
        if each.suffix in (".py", ".so", ".pyc"):
            out[str(each)] = READ_FILE
        elif (each / "__init__.py").is_file():
            out[str(each)] = READ_FILE | READ_DIR
    return out


def restrict_files(paths: dict[str, int]) -> int:
    """From now on this process and what it forks can open these for reading, and nothing else. Returns the ABI."""
    abi = _libc.syscall(landlock.CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        raise SandboxError(
            f"landlock is not available: {os.strerror(ctypes.get_errno())}",
            hint="Boot with lsm=landlock,… on Linux 5.13 or later",
        )
    attributes = landlock.attributes(abi)
    ruleset = _libc.syscall(landlock.CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    if ruleset < 0:
        raise _failed("landlock_create_ruleset")
    try:
        for path, rights in paths.items():
            _allow(ruleset, path, rights)
        _no_new_privileges()
        if _libc.syscall(landlock.RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
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
            rights &= ~READ_DIR
        rule, beneath = landlock.path_rule(rights, fd), ctypes.c_int(landlock.RULE_PATH_BENEATH)
        if _libc.syscall(landlock.ADD_RULE, ctypes.c_int(ruleset), beneath, rule, ctypes.c_uint32(0)):
            raise _failed("landlock_add_rule")
    finally:
        os.close(fd)


def _no_new_privileges() -> None:
    if _libc.prctl(38, 1, 0, 0, 0):
        raise _failed("PR_SET_NO_NEW_PRIVS")


def _failed(what: str) -> SandboxError:
    return SandboxError(f"{what}: {os.strerror(ctypes.get_errno())}")


# --- seccomp ----------------------------------------------------------------------------------

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
    "setgroups": (116, 159),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
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


def filter_program(machine: str, pid: int, forking: bool) -> list[Instruction]:
    """The filter for a process. Raises SandboxError."""
    made = Filter(machine)
    allowed = _ALWAYS | _FORKING if forking else _ALWAYS
    for numbers in allowed.values():
        made.rule(numbers, [verdict(ALLOW)])
    for numbers, index in ((_OPENAT, 2), (_OPEN, 1)):
        made.rule(numbers, any_bit(index, _WRITING))
    made.rule(_IOCTL, one_of(1, _IOCTLS))
    made.rule(_FCNTL, one_of(1, _FCNTLS))
    made.rule(_PRLIMIT, one_of(0, (0, pid)))
    if forking:
        made.rule(_CLONE, any_bit(0, _CLONE_THREAD))
    else:
        made.rule(_KILL, one_of(0, (pid,)))
        made.rule(_TGKILL, one_of(0, (pid,)))
    made.rule(_CLONE3, [verdict(NOT_BUILT_IN)])  # the C library falls back to clone, whose flags a filter sees
    return made.otherwise(DENY)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def restrict_calls(*, forking: bool) -> None:
    """Put the filter on this process for good. Raises SandboxError."""
    program = filter_program(platform.machine(), os.getpid(), forking)
    packed = ctypes.create_string_buffer(seccomp.packed(program))
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
