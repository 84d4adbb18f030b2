"""Network namespaces without names: an open file of this process holds each, and it is gone when the process is.

So there is nothing to remove after Ctrl-C, a crash or ``kill -9``: the kernel does it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
COMMANDS = ("ip", "tc")
SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",  # what interfaces say by themselves over IPv6 is not what we count
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/tcp_congestion_control": "reno",  # the one that every kernel allows in a namespace
}


def check_requirements() -> None:
    """Raise ``ValueError`` with one sentence if namespaces or the commands that set them up are not to be had."""
    if not sys.platform.startswith("linux"):
        raise ValueError("the network lab needs Linux: its hosts are network namespaces")
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise ValueError(f"the network lab needs the command {' and '.join(missing)}, which the package iproute2 has")
    Namespace.create().close()


@dataclass(frozen=True)
class Namespace:
    """A network namespace.

    Args:
        path: a file that leads to it, for other processes as well, as long as the process that made it lives.
    """

    path: str

    @classmethod
    def create(cls) -> Namespace:
        """Make a namespace that lives until it is closed, or this process ends. Raises ``ValueError`` without root."""
        file = _in_thread(_unshared)
        made = cls(f"/proc/{os.getpid()}/fd/{file}")
        _in_thread(made._prepare)
        return made

    def close(self) -> None:
        """Let go of it: the kernel removes it, and its interfaces, once no process is in it."""
        assert self.path.startswith(f"/proc/{os.getpid()}/"), "only the process that made a namespace closes it"
        os.close(int(self.path.rpartition("/")[2]))

    def enter(self) -> None:
        """Move the calling thread, and the threads and processes it starts from now on, into the namespace."""
        file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", file, CLONE_NEWNET)
        finally:
            os.close(file)

    def run(self, *command: str, lines: Sequence[str] = ()) -> None:
        """Run a command inside, ``lines`` on its standard input. Raises ``OSError`` with what it says if it fails."""

        def inside() -> subprocess.CompletedProcess[str]:
            self.enter()
            return subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)

        done = _in_thread(inside)
        if done.returncode:
            raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def _prepare(self) -> None:
        self.enter()
        for name, value in SETTINGS.items():
            place = Path("/proc/sys/net", name)
            if place.exists():
                place.write_text(value)


def _unshared() -> int:
    """Move this thread into a new namespace and return an open file that leads to it."""
    try:
        _call("unshare", CLONE_NEWNET)
    except PermissionError:
        raise ValueError(
            "the network lab needs root, to make network namespaces: run it with sudo, or as root of a user "
            "namespace, unshare --map-root-user sparsync lab ..."
        ) from None
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the C library (Python has these from 3.12 on); raise ``OSError`` if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, as threads have namespaces, and return or raise what it does."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
