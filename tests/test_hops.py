"""Bytes and hops, counted from records."""

from test_figures import BYTES, all_gather, all_reduce, broadcast, recorded, tree_broadcast

from ddpkit.tools.hops import hops_of, received_bytes, sent_bytes


def test_bytes_and_hops():
    linear, both, gather = recorded(broadcast), recorded(all_reduce), recorded(all_gather)
    assert sent_bytes(linear) == [3 * BYTES, 0, 0, 0]
    assert received_bytes(linear) == [0] + [BYTES] * 3
    assert sent_bytes(both) == received_bytes(both) == [3 * BYTES] + [BYTES] * 3
    assert sent_bytes(gather) == [3 * BYTES] * 4
    assert hops_of(linear) == [[(0, rank, BYTES)] for rank in range(1, 4)]
    assert len(hops_of(both)) == 2 * 3
    (at_once,) = hops_of(gather)
    assert len(at_once) == 4 * 3
    tree = recorded(tree_broadcast)
    assert hops_of(tree) == [[(0, 1, BYTES)], [(0, 2, BYTES), (1, 3, BYTES)]]
