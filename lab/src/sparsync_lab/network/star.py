"""Hosts as network namespaces, each on a link of its own to one switch, both directions held to a rate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from sparsync_lab.network.namespace import Namespace
from sparsync_lab.network.shaping import Rate

BRIDGE, INTERFACE = "switch", "eth0"
MOST_HOSTS = 64


@dataclass(frozen=True)
class Host:
    """A host: its namespace and its link to the switch; any process may hold and use it while the network lives.

    Args:
        number: from 0.
        namespace: with the interface ``INTERFACE`` and nothing else.
        switch: the namespace of the switch.
    """

    number: int
    namespace: Namespace
    switch: Namespace

    @property
    def address(self) -> str:
        return f"10.0.0.{self.number + 1}"

    @property
    def port(self) -> str:
        """Return the name of the switch's end of the link."""
        return f"port{self.number}"

    def set_rate(self, rate: Rate) -> None:
        """Hold what the host sends, and what the switch sends to it, to a rate from now on."""
        self.namespace.run("tc", *f"qdisc replace dev {INTERFACE} root {rate.token_bucket}".split())
        self.switch.run("tc", *f"qdisc replace dev {self.port} root {rate.token_bucket}".split())


@dataclass(frozen=True)
class Star:
    """Hosts around a switch."""

    hosts: tuple[Host, ...]

    def set_rate(self, rate: Rate) -> None:
        """Hold all links to a rate from now on."""
        for host in self.hosts:
            host.set_rate(rate)


@contextmanager
def star(hosts: int, rate: Rate) -> Iterator[Star]:
    """Yield so many hosts around a switch, their links held to a rate; nothing of it is seen from outside."""
    if not 2 <= hosts <= MOST_HOSTS:
        raise ValueError(f"workers must be from 2 to {MOST_HOSTS}, got {hosts}")
    with ExitStack() as stack:

        def namespace() -> Namespace:
            made = Namespace.create()
            stack.callback(made.close)
            return made

        switch = namespace()
        made = Star(tuple(Host(number, namespace(), switch) for number in range(hosts)))
        ports = [f"link add {BRIDGE} type bridge mcast_snooping 0", f"link set {BRIDGE} up"]
        for host in made.hosts:
            ends = f"{host.port} type veth peer name {INTERFACE} netns {host.namespace.path}"
            ports += [f"link add {ends}", f"link set {host.port} master {BRIDGE} up"]
        switch.run("ip", "-batch", "-", lines=ports)
        for host in made.hosts:
            own = [f"address add {host.address}/24 dev {INTERFACE}", f"link set {INTERFACE} up", "link set lo up"]
            host.namespace.run("ip", "-batch", "-", lines=own)
        made.set_rate(rate)
        yield made
