"""The seccomp profile of native processes: what an ordinary program never needs is refused.

Files are landlock's business and the network is the namespace's; here go calls that reach other processes, the machine
or parts of the kernel that have often been the way out. Unlike the list for hosts of Python agents this one names what
is forbidden, for a command may be any program; calls newer than the list are told not to exist.
"""

import platform
from functools import cache
from typing import Final

from agentrt.sandbox import seccomp
from agentrt.sandbox.seccomp import ALLOW, DENY, NOT_BUILT_IN, Filter, Instruction, Numbers, any_bit, one_of, verdict

#: Number on x86_64, on aarch64 (None: there is no such call).
DENIED: Final[dict[str, Numbers]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "nfsservctl": (180, 42),
    # doors into the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    # what System V and POSIX share by name, with whoever has the same user
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
}
_CLONE: Final[Numbers] = (56, 220)
_CLONE3: Final[Numbers] = (435, 435)
_SOCKET: Final[Numbers] = (41, 198)
_IOCTL: Final[Numbers] = (16, 29)
_PERSONALITY: Final[Numbers] = (135, 92)
_CLONE_NEW: Final = 0x7E02_0000  # namespaces of all kinds
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
#: unix, inet, inet6, netlink (name resolution); others have had many holes and few users.
_FAMILIES_WITH_NETWORK: Final = (1, 2, 10, 16)
_FAMILIES: Final = (1,)
#: What it is, what it was, and without address randomisation, for debuggers of the program's own.
_PERSONALITIES: Final = (0, 0x0004_0000, 0xFFFF_FFFF)
_FIRST_UNKNOWN: Final = 463


def filter_program(machine: str, sockets: bool) -> list[Instruction]:
    """The filter. ``sockets``: IP sockets may be made, because there is a network namespace around them or network is
    granted. Raises SandboxError for another machine."""
    made = Filter(machine)
    for numbers in DENIED.values():
        made.rule(numbers, [verdict(DENY)])
    made.rule(_CLONE, any_bit(0, _CLONE_NEW))
    made.rule(_CLONE3, [verdict(NOT_BUILT_IN)])  # the C library falls back to clone, whose flags a filter sees
    made.rule(_SOCKET, one_of(0, _FAMILIES_WITH_NETWORK if sockets else _FAMILIES))
    made.rule(_IOCTL, one_of(1, (_TIOCSTI, _TIOCLINUX), then=DENY, otherwise=ALLOW))
    made.rule(_PERSONALITY, one_of(0, _PERSONALITIES))
    made.from_number(_FIRST_UNKNOWN, NOT_BUILT_IN)
    return made.otherwise(ALLOW)


@cache
def filter_here(sockets: bool) -> bytes:
    """The filter for this machine, as the kernel takes it. Raises SandboxError."""
    return seccomp.packed(filter_program(platform.machine(), sockets))
