"""Count the messages in a run's records: bytes by rank, and hops."""


def sent_bytes(run) -> list[int]:
    """Return, for each rank, the bytes of its sends, except those inside torch's collectives.

    run: what `launch` returned; `run.wire` has the records of each rank.
    """
    return _bytes(run, "send")


def received_bytes(run) -> list[int]:
    """Return, for each rank, the bytes of its receives, except those inside torch's collectives.

    run: what `launch` returned.
    """
    return _bytes(run, "recv")


def _bytes(run, op: str) -> list[int]:
    """Return, for each rank, the sum of the bytes of its records whose operation is `op`."""
    found = []
    for records in run.wire:
        found.append(sum(record.bytes for record in records if record.op == op))
    return found


def hop_numbers(run) -> dict[tuple, int]:
    """Return {(channel, seq): hop} of all messages both sent and received; hops count from 1.

    A message is one hop later than the latest of those that its sender or receiver had finished
    before they began it. So hops follow one another on a connection of any speed, and messages that
    can be sent at the same time are in the same hop. channel: between two ranks, such as "0#1
    2>3:7" from rank 2 to 3, with tag 7. seq: the number of earlier messages on it.

    run: what `launch` returned.
    """
    ends: dict[tuple, set] = {}
    for records in run.wire:
        for record in records:
            if record.op in ("send", "recv"):
                ends.setdefault((record.channel, record.seq), set()).add(record.op)
    depth = {key: 1 for key, ops in ends.items() if len(ops) == 2}
    while any(_push_later(records, depth) for records in run.wire):
        pass
    return depth


def _push_later(records: list, depth: dict[tuple, int]) -> bool:
    """Move each message of a rank to the hop after the latest that was finished before it began.

    Those that are in a later hop already stay. Return whether any was moved.

    records: the rank's calls.
    depth: {(channel, seq): the hop of this message so far}; changed in place.
    """
    moved, so_far = False, 0
    steps = [(record.issued, 1, record) for record in records]
    steps += [(record.done, 0, record) for record in records if record.done is not None]
    for _, begins, record in sorted(steps, key=lambda step: step[:2]):
        key = (record.channel, record.seq)
        if key not in depth:
            continue
        if not begins:
            so_far = max(so_far, depth[key])
        elif depth[key] <= so_far < len(depth):  # the bound: records may contradict each other
            depth[key], moved = so_far + 1, True
    return moved


def hops_of(run) -> list[list[tuple[int, int, int]]]:
    """Return, for each hop, the sorted list of its messages as (sender, receiver, bytes).

    run: what `launch` returned.
    """
    numbers_of = hop_numbers(run)
    found: list[list] = [[] for _ in range(max(numbers_of.values(), default=0))]
    for rank, records in enumerate(run.wire):
        for record in records:
            hop = numbers_of.get((record.channel, record.seq))
            if hop and record.op == "send":
                found[hop - 1].append((rank, record.peer, record.bytes))
    return [sorted(hop) for hop in found]
