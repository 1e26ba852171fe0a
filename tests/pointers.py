"""Which buffers of an arena a launch was given the addresses of."""

from moelet.graphs.arena import Arena
from moelet.graphs.kernel import PreparedLaunch


def pointed_at(launch: PreparedLaunch, arena: Arena) -> set[str]:
    """The buffers that a launch's pointers lie in; every pointer but null lies in one."""
    addresses = [one.value for one in launch.arguments.arguments.values() if one.format == "<Q" and one.value]
    ranges = {name: (arena.pointer(name), spec.num_bytes) for name, spec in arena.plan.buffers.items()}
    owners = {
        address: [name for name, (start, size) in ranges.items() if start <= address < start + size]
        for address in addresses
    }
    assert all(len(names) == 1 for names in owners.values()), owners
    return {name for names in owners.values() for name in names}
