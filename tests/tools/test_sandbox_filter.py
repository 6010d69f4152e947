"""The filter of system calls, run by hand for both architectures."""

import errno
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent_loop.tools.sandbox.inside import seccomp
from agent_loop.tools.sandbox.inside.seccomp import ABSENT, ARCHITECTURES, OF_OWNERS, RULES, Numbers

REFUSED = seccomp.REFUSED | OF_OWNERS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
CLONE, CLONE3, SOCKET, SOCKETPAIR, OPENAT = (56, 220), (435, 435), (41, 198), (53, 199), (257, 56)


def verdict(
    lines: list[seccomp.BpfLine], *, architecture: int, number: int, arguments: tuple[int, ...] = ()
) -> int:
    """Return the decision of a program on a system call."""
    data = {seccomp.NUMBER_OFFSET: number, seccomp.ARCHITECTURE_OFFSET: architecture}
    for place in range(6):
        data[seccomp.ARGUMENTS_OFFSET + 8 * place] = arguments[place] if place < len(arguments) else 0
    loaded, at = 0, 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == seccomp.LOAD:
            loaded = data[operand]
        elif code == seccomp.AND:
            loaded &= operand
        elif code == seccomp.JUMP_EQUAL:
            at += if_true if loaded == operand else if_false
        elif code == seccomp.JUMP_AT_LEAST:
            at += if_true if loaded >= operand else if_false
        else:
            return operand


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> str:
    return request.param


def ask(machine: str, numbers: Numbers, *arguments: int, refused: Mapping[str, Numbers] = REFUSED) -> int:
    architecture, column = ARCHITECTURES[machine]
    lines = seccomp.make_program(machine, refused=refused, rules=RULES)
    return verdict(lines, architecture=architecture, number=numbers[column], arguments=arguments)


def test_refused_system_calls_fail_and_others_are_allowed(machine: str) -> None:
    architecture, column = ARCHITECTURES[machine]
    lines = seccomp.make_program(machine, refused=REFUSED, rules=RULES)
    refused = {numbers[column] for numbers in REFUSED.values()} - {ABSENT}
    ruled = {rule.numbers[column] for rule in RULES}
    for number in range(600):
        said = verdict(lines, architecture=architecture, number=number)
        if number in refused:
            assert said == seccomp.ERRNO | errno.EPERM
        elif number not in ruled:
            assert said == seccomp.ALLOW


@pytest.mark.parametrize("number", [0, 1, 62, 0x40000000, 0x40000000 + 101, ABSENT])
def test_system_calls_of_another_architecture_kill_the_process(machine: str, number: int) -> None:
    lines = seccomp.make_program(machine, refused=REFUSED, rules=RULES)
    i386 = 0x40000003
    assert verdict(lines, architecture=i386, number=number) == seccomp.KILL
    if number >= seccomp.X32_BIT:
        assert verdict(lines, architecture=ARCHITECTURES[machine][0], number=number) == seccomp.KILL


@pytest.mark.parametrize(
    ("numbers", "arguments", "error"),
    [
        (CLONE, (0x00010F00,), 0),  # a thread
        (CLONE, (17,), 0),  # a process
        (CLONE, (0x10000000 | 17,), errno.EPERM),
        (CLONE, (0x40000000 | 17,), errno.EPERM),
        (CLONE3, (), errno.ENOSYS),
        (SOCKET, (socket.AF_UNIX,), errno.ENETUNREACH),
        (SOCKET, (socket.AF_INET,), errno.ENETUNREACH),
        (SOCKETPAIR, (socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC), 0),
        (SOCKETPAIR, (socket.AF_UNIX, socket.SOCK_DGRAM), errno.ENETUNREACH),
        (SOCKETPAIR, (socket.AF_INET, socket.SOCK_STREAM), errno.ENETUNREACH),
        (OPENAT, (0, 0, 0o100), 0),
        (OPENAT, (0, 0, 0o1 | 0o100 | 0o1000), 0),
        (OPENAT, (0, 0, 0o1000), errno.EPERM),
        ((302, 261), (0,), 0),
        ((302, 261), (1,), errno.EPERM),
        ((141, 140), (0, 0, 5), 0),
        ((141, 140), (2, 0, 5), errno.EPERM),
        ((141, 140), (0, 1, 5), errno.EPERM),
    ],
)
def test_rules_depend_on_the_arguments(
    machine: str, numbers: Numbers, arguments: tuple[int, ...], error: int
) -> None:
    assert ask(machine, numbers, *arguments) == (seccomp.ERRNO | error if error else seccomp.ALLOW)


def test_the_numbers_match_the_kernel_headers(machine: str) -> None:
    header, column = HEADERS[machine], ARCHITECTURES[machine][1]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE))
    ours = {name: str(numbers[column]) for name, numbers in REFUSED.items() if numbers[column] != ABSENT}
    assert {name: known[name] for name in ours if name in known} == {
        name: number for name, number in ours.items() if name in known
    }
    assert len(known.keys() & ours.keys()) > 50
