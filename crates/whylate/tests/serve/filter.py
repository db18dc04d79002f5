# SPDX-License-Identifier: MIT OR Apache-2.0
"""usage: filter.py UNIT PROGRAM [ARGUMENT...]

Becomes PROGRAM under the SystemCallFilter= of a unit of systemd. Any other system call kills it, whatever the unit's
SystemCallErrorNumber= is: so none that it needs goes unnoticed.
"""

import ctypes
import os
import re
import struct
import subprocess
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Instructions of a BPF filter: load a word of `struct seccomp_data`, compare and jump, return.
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT = 0, 4


def output_of(*command, given=""):
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


def calls_of(name):
    """The names of a group (@name), or the name of one call."""
    if not name.startswith("@"):
        return {name}
    members = [line.strip() for line in output_of("systemd-analyze", "--no-pager", "syscall-filter", name).splitlines()[1:]]
    return set().union(*(calls_of(member) for member in members if member and not member.startswith("#")))


def main():
    with open(sys.argv[1]) as unit:
        filters = re.findall(r"(?m)^SystemCallFilter=(.*)", unit.read())
    allowed = calls_of("@default").union(*(calls_of(name) for name in " ".join(filters).split()))
    defined = output_of("gcc", "-E", "-dM", "-x", "c", "-", given="#include <asm/unistd.h>\n")
    numbers = dict(re.findall(r"(?m)^#define __NR_(\w+) (\d+)$", defined))
    architecture = ARCHITECTURES[os.uname().machine]
    instructions = [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_IF_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS), (LOAD, 0, 0, NUMBER_AT)]
    for name in sorted(allowed & numbers.keys()):
        instructions += [(JUMP_IF_EQUAL, 0, 1, int(numbers[name])), (RETURN, 0, 0, ALLOW)]
    instructions.append((RETURN, 0, 0, KILL_PROCESS))
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    program = Program(len(instructions), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
        if libc.prctl(*arguments) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execv(sys.argv[2], sys.argv[2:])


main()
