"""The player: real runs, right and wrong, replayed step by step, alike in every run."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from test_figures import has_colour

from ddpkit import HangError, LaunchError, RankError, collectives, launch
from ddpkit.lesson import figures
from ddpkit.lesson.player import MOST_FRAMES, explorer, film, hop_by_hop, player, replay, world_explorer


def mine(length: int = 2) -> torch.Tensor:
    """Each digit of a sum counts one rank."""
    return torch.tensor([10.0 ** dist.get_rank() * (at + 1) for at in range(length)])


def broadcast():
    collectives.broadcast(mine(), src=0)


def naive():
    collectives.all_reduce(mine())


def all_gather():
    collectives.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], mine(1))


def ring_and_return():
    return ring().tolist()


def ring(hops_per_rank=None):
    x, rank, world_size = mine(8), dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(hops_per_rank or world_size - 1):
        outgoing, into = chunks[(rank - hop - 1) % world_size], chunks[(rank - hop - 2) % world_size]
        incoming = torch.empty_like(into)
        send = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        send.wait()
        into += incoming
    return x


def torch_collectives():
    dist.all_reduce(mine())
    dist.broadcast(mine(1), src=dist.get_world_size() - 1)
    parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine(1))
    dist.barrier()


def all_receive():
    dist.recv(mine(1), src=(dist.get_rank() + 1) % dist.get_world_size())


def all_send():
    dist.send(mine(1), dst=1 - dist.get_rank())


def lengths_differ():
    dist.all_reduce(mine(2 + dist.get_rank() % 2))


def one_stays_away():
    if dist.get_rank() != 2:
        dist.all_reduce(mine())


def one_is_forgotten():
    if dist.get_rank() == 0:
        dist.send(mine(), dst=1)
    else:
        dist.recv(torch.zeros(2), src=0)


def sizes_differ():
    if dist.get_rank() == 0:
        dist.send(mine(2), dst=1)
    else:
        dist.recv(torch.zeros(3), src=0)


def nobody_receives():
    if dist.get_rank() == 0:
        dist.isend(mine(), dst=1)


def one_raises():
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.recv(torch.zeros(1), src=1)


def handle_is_dropped():
    x = mine(1)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.isend(x, 1)
    else:
        time.sleep(0.2)
        dist.recv(x, 0)


def silence():
    pass


def outcome(fn, *args, world_size=2):
    """The Run of `fn`, or the error it ended in."""
    try:
        return launch(fn, *args, world_size=world_size, keep_values=True)
    except LaunchError as error:
        return error


def test_broadcast():
    assert repr(player(outcome(broadcast, world_size=3))) == (
        "1. rank 0 sends [1, 2] to rank 1\n"
        "2. rank 1 receives [1, 2] from rank 0\n"
        "3. rank 0 sends [1, 2] to rank 2\n"
        "4. rank 2 receives [1, 2] from rank 0"
    )


def test_naive_all_reduce():
    assert repr(player(outcome(naive, world_size=2))) == (
        "1. rank 1 sends [10, 20] to rank 0\n"
        "2. rank 0 receives [10, 20] from rank 1\n"
        "3. rank 0 sends [11, 22] to rank 1\n"
        "4. rank 1 receives [11, 22] from rank 0"
    )


def test_collectives_of_torch():
    assert repr(player(outcome(torch_collectives))) == (
        "1. all_reduce(2 float32, sum): rank 0 [1, 2], rank 1 [10, 20] → [11, 22] on every rank\n"
        "2. broadcast(1 float32, src=1): rank 1 [10] → [10] on every rank\n"
        "3. all_gather(1 float32): rank 0 [1], rank 1 [10] → [1, 10] on every rank\n"
        "4. ranks 0 and 1 met at a barrier"
    )


@pytest.mark.parametrize("fn", [broadcast, naive, all_gather, ring, torch_collectives])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_causes_come_before_effects(fn, world_size):
    run = outcome(fn, world_size=world_size)
    events = replay(run)
    sent = set()
    for event in events:
        keys = {(record.channel, record.seq) for record in event.records.values()}
        if event.kind == "send":
            sent |= keys
        if event.kind == "receive":
            assert keys <= sent
        assert not event.wrong
    assert sum(event.kind == "send" for event in events) == sum(r.op == "send" for rs in run.wire for r in rs)
    assert sum(event.kind == "receive" for event in events) == sum(r.op == "recv" for rs in run.wire for r in rs)
    for rank, records in enumerate(run.wire):  # a rank's own order is kept
        said = [e.records[rank] for e in events if e.kind == "send" and e.rank == rank]
        assert said == [r for r in records if r.op == "send"]


@pytest.mark.parametrize("fn", [naive, all_gather, ring, torch_collectives, all_receive, lengths_differ])
def test_the_same_replay_every_time(fn):
    traces = {repr(player(outcome(fn, world_size=4))) for _ in range(3)}
    assert len(traces) == 1


def test_film_knows_whose_data_it_shows():
    run = outcome(all_gather, world_size=3)
    last = film(replay(run), run.wire)[-1]
    for memory in last.memory:
        held = sorted(pair for cells in memory.values() for pair in zip(cells.values, cells.owners, strict=True))
        assert held == [(1, 0), (10, 1), (100, 2)]


def into_one_tensor():
    collectives.all_gather(list(torch.zeros(dist.get_world_size(), 1)), mine(1))


def test_film_shows_no_message_before_it_arrives():
    run = outcome(into_one_tensor, world_size=3)
    received = [[] for _ in run.wire]
    for frame in film(replay(run), run.wire):
        event = frame.event
        if event.kind == "receive":
            received[event.peer].append(10.0**event.rank)
        for rank, memory in enumerate(frame.memory):
            shown = {value for cells in memory.values() for value in cells.values if value}
            assert shown <= {10.0**rank, *received[rank]}


def test_film_of_collectives():
    run = outcome(torch_collectives, world_size=2)
    last = film(replay(run), run.wire)[-1]
    gathered = last.memory[0]["all_gather"]
    assert (gathered.values, gathered.owners) == ([1, 10], [0, 1])
    summed = next(cells for cells in last.memory[0].values() if cells.values == [11, 22])
    assert summed.owners == [None, None]


def test_film_of_a_ring():
    run = outcome(ring, world_size=4)
    frames = film(replay(run), run.wire)
    whole = next(cells for cells in frames[0].memory[1].values() if len(cells.values) == 8)
    assert whole.values == [10, 20, 30, 40, 50, 60, 70, 80]
    assert whole.owners == [1] * 8
    received = [value for memory in frames[-1].memory for cells in memory.values() for value in cells.values]
    assert 1110 in received  # rank 0 gets the sum of the others for its chunk
    mixed = [owner for memory in frames[-1].memory for cells in memory.values() for owner in cells.owners]
    assert None in mixed


WRONG = {
    all_receive: (
        "1. rank 0 waits here for ever: no message comes from rank 1\n"
        "2. rank 1 waits here for ever: no message comes from rank 0"
    ),
    all_send: (
        "1. rank 0 sends [1] to rank 1\n"
        "2. rank 1 sends [10] to rank 0\n"
        "3. rank 0 waits here for ever: rank 1 never receives its [1]\n"
        "4. rank 1 waits here for ever: rank 0 never receives its [10]"
    ),
    lengths_differ: (
        "1. the ranks disagree: rank 0 calls all_reduce(2 float32, sum), rank 1 calls all_reduce(3 float32, sum)"
    ),
    sizes_differ: (
        "1. rank 0 sends [1, 2] to rank 1\n"
        "2. the ranks disagree: rank 0 sends 2 float32 to rank 1, which expects 3 float32"
    ),
    nobody_receives: "1. rank 0 sends [1, 2] to rank 1\n2. rank 1 never receives [1, 2] from rank 0",
    handle_is_dropped: (
        "1. ranks 0 and 1 met at a barrier\n"
        "2. rank 0 sends [1] to rank 1\n"
        "3. rank 1 waits here for ever: rank 0 never waited for its send, and the message was dropped"
    ),
    one_raises: "1. rank 1 fails, as the error says\n2. rank 0 waits here in vain: no message comes from rank 1",
}


@pytest.mark.parametrize("fn", WRONG)
def test_wrong_code(fn):
    replayed = player(outcome(fn))
    assert repr(replayed) == WRONG[fn]
    assert has_colour(replayed._repr_mimebundle_()["image/png"], figures.WRONG)


def test_a_rank_that_never_comes():
    error = outcome(one_stays_away, world_size=3)
    assert isinstance(error, HangError)
    said = "1. ranks 0 and 1 wait for ever in all_reduce(2 float32, sum) for rank 2, which never calls it"
    assert repr(player(error)) == said


def test_a_rank_that_is_forgotten():
    error = outcome(one_is_forgotten, world_size=3)
    assert repr(player(error)).splitlines()[-1] == "3. rank 2 waits here for ever: no message comes from rank 0"


def test_the_kind_of_error_is_no_matter():
    assert isinstance(outcome(one_raises), RankError)


def test_widget():
    replayed = player(outcome(broadcast, world_size=3))
    slider, image, caption = replayed.slider, replayed.image, replayed.caption
    assert (slider.min, slider.max, slider.value) == (1, 4, 1)
    assert "Step 1 of 4: rank 0 sends [1, 2] to rank 1" in caption.value
    assert "of broadcast: collectives.broadcast(mine(), src=0)" in caption.value
    assert slider.continuous_update is False
    before = image.value
    slider.value = 2
    assert bytes(image.value).startswith(b"\x89PNG")
    assert image.value != before
    assert "Step 2 of 4: rank 1 receives" in caption.value
    slider.value = 1
    assert image.value == before
    assert image.tooltip is None  # the browser's view of an image fails on a tooltip


def test_bundle():
    replayed = player(outcome(broadcast, world_size=2))
    bundle = replayed._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png", "application/vnd.jupyter.widget-view+json"}
    assert bundle["text/plain"] == repr(replayed)
    assert bundle["image/png"] == replayed.picture(2).png  # the last step
    for colour in figures.RANK_COLOURS[:2]:
        assert has_colour(bundle["image/png"], colour)


def test_errors_in_callbacks_are_shown():
    def draw(value):
        if value == 2:
            raise ValueError("no <two>")
        return figures.worlds(value)

    widget = explorer(draw, str, "ranks", 1, 3, 1)
    widget.slider.value = 2
    assert "ValueError: no &lt;two&gt;" in widget.caption.value
    widget.slider.value = 3
    assert "ValueError" not in widget.caption.value


def test_world_explorer():
    widget = world_explorer(gpus=0)
    assert repr(widget) == repr(figures.worlds(4))
    picture = widget.image.value
    widget.slider.value = 2
    assert widget.image.value != picture
    assert "2 ranks are 2 processes" in widget.caption.value


def test_values_must_be_kept():
    with pytest.raises(ValueError, match="keep_values=True"):
        player(launch(broadcast, world_size=2))
    with pytest.raises(ValueError, match="got int"):
        player(3)


def test_silence():
    replayed = player(outcome(silence))
    assert repr(replayed) == "The ranks sent nothing."
    assert replayed._repr_mimebundle_()["image/png"].startswith(b"\x89PNG")
    assert replayed.slider.max == 1


def ping_pong(rounds):
    for _ in range(rounds):
        if dist.get_rank() == 0:
            dist.send(mine(1), dst=1)
        else:
            dist.recv(torch.zeros(1), src=0)


def test_long_runs_are_cut():
    replayed = player(outcome(ping_pong, 70))
    lines = repr(replayed).splitlines()
    assert len(lines) == MOST_FRAMES + 1
    assert lines[-1] == "… and 20 more steps: a replay shows 120 at most"
    assert replayed.slider.max == MOST_FRAMES


def test_without_ipywidgets():
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from ddpkit.lesson.player import world_explorer\n"
        "bundle = world_explorer()._repr_mimebundle_()\n"
        "print(sorted(bundle), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['image/png', 'text/plain'] False\n"), done.stderr


def test_hop_by_hop():
    """One step for all messages of a hop: the sums of the hop before are there, its own messages are on their way."""
    run = launch(ring, world_size=3, keep_values=True)
    shown = player(run, by_hop=True)
    assert repr(shown).splitlines() == [
        "hop 1: rank 0 sends [7, 8] to rank 1, 1 sends [10, 20, 30] to rank 2, 2 sends [400, 500, 600] to rank 0",
        "hop 2: rank 0 sends [404, 505, 606] to rank 1, 1 sends [77, 88] to rank 2, 2 sends [110, 220, 330] to rank 0",
        "the end: what each rank has now",
    ]
    assert shown.slider.max == 3
    assert "line" in shown.caption.value
    second = hop_by_hop(film(replay(run), run.wire), run)[1]
    assert [frame.event.kind for frame in second.sent] == ["send"] * 3
    assert second.marked.keys() == {0, 1, 2}
    assert second.memory[0][0].values == [1, 2, 3, 404, 505, 606, 7, 8]
    assert shown.picture(1).png != shown.picture(2).png != shown.picture(3).png


def test_hop_by_hop_ends_with_what_the_ranks_returned():
    """The last sum of a reduce-scatter is never sent: only the result shows it."""
    run = launch(ring_and_return, world_size=3, keep_values=True)
    end = hop_by_hop(film(replay(run), run.wire), run)[-1]
    assert end.memory[0][0].values == run[0]
    assert end.memory[0][0].values[:3] == [111, 222, 333]
    assert end.memory[0][0].owners == [None] * 6 + [0, 0]


@pytest.mark.parametrize("fn", [torch_collectives, ring], ids=["collectives", "failed"])
def test_hop_by_hop_falls_back_to_single_steps(fn):
    """Where there is more than messages to see, or one is missing, nothing is lumped together."""
    if fn is ring:
        with pytest.raises(LaunchError) as caught:
            launch(one_hop_too_many, world_size=2, keep_values=True)
        run = caught.value
    else:
        run = launch(fn, world_size=2, keep_values=True)
    assert repr(player(run, by_hop=True)) == repr(player(run))


def one_hop_too_many():
    ring(1 + dist.get_rank())
