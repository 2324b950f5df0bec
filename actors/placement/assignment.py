"""Which bundle of the placement group each worker gets, once Ray has placed the bundles.

Ray sorts the bundles before it fills one node after the other, and its sort mixes equal ones
(https://github.com/ray-project/ray/issues/51117). The bundles of 8 policy ranks and 8 engines on two nodes:

    bundle       0   1 ... 7   8   9 ... 15
    node         a   b ... b   b   a  ... a
    in order     ranks 0 ... 7, on a and b     engines 8 ... 15, on a and b
    assigned     ranks 0, 9 ... 15, all on a   engines 1 ... 8, all on b
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.placement.fitting import Bundle


def assigned(
    wanted: Sequence[Bundle], nodes: Sequence[str], kept: Mapping[int, int] | None = None
) -> list[int]:
    """Return for each of ``wanted`` the index of a bundle of the same size. The same arguments give the same
    indices; on one node they are 0, 1, 2 ...

    Roles choose in the order of ``wanted``. Each takes whole nodes first, node after node, on as few as keep
    its `adjacent` bundles together.

    Args:
        wanted: bundles of all workers, in the order in which they are in the group.
        nodes: the node of each bundle of the group.
        kept: indices of bundles that stay as they are, by their positions in ``wanted``.

    Two ranks and two engines of one GPU each, nodes a b b a -> [0, 3, 1, 2].
    """
    found = dict(kept or {})
    for (role, size), own in _alike(wanted, found).items():
        taken = set(found.values())
        free = [i for i, bundle in enumerate(wanted) if _size(bundle) == size and i not in taken]
        near = [nodes[index] for i, index in found.items() if wanted[i].role == role]
        chosen = _chosen(free, nodes, near, len(own), wanted[own[0]].adjacent)
        found |= zip(own, chosen, strict=True)
    return [found[i] for i in range(len(wanted))]


def _size(bundle: Bundle) -> tuple[int, int]:
    return bundle.gpus, bundle.cpus


def _alike(wanted: Sequence[Bundle], kept: Mapping[int, int]) -> dict[tuple[str, tuple[int, int]], list[int]]:
    """Return the positions of bundles of the same role and size, without those that are kept."""
    found: dict[tuple[str, tuple[int, int]], list[int]] = {}
    for i, bundle in enumerate(wanted):
        if i not in kept:
            found.setdefault((bundle.role, _size(bundle)), []).append(i)
    return found


def _chosen(
    free: Sequence[int], nodes: Sequence[str], near: Sequence[str], count: int, adjacent: int
) -> list[int]:
    """Return ``count`` of the bundles ``free``, node after node. Each ``adjacent`` successive ones are on one
    node, but for the last where no node has room for so many. ``near``: nodes that the role is on already.
    """
    left: dict[str, list[int]] = {node: [] for node in near}
    for index in free:
        left.setdefault(nodes[index], []).append(index)
    found: list[int] = []
    for size in (adjacent, 1):
        while (needed := (count - len(found)) // size) and (node := _node(left, near, needed, size)):
            taken = size * min(needed, len(left[node]) // size)
            found += left[node][:taken]
            left[node] = left[node][taken:]
    return found


def _node(left: Mapping[str, Sequence[int]], near: Sequence[str], needed: int, size: int) -> str | None:
    """Return the node to fill next: the smallest with ``needed`` times ``size`` of the bundles ``left``, one
    of ``near`` first, or else the largest; None: none has ``size``. Of equal nodes it is the first.
    """
    rooms = {node: len(own) // size for node, own in left.items() if len(own) >= size}
    enough = [node for node, room in rooms.items() if room >= needed]
    if enough:
        return min(enough, key=lambda node: (node not in near, len(left[node])))
    return max(rooms, key=lambda node: rooms[node], default=None)
