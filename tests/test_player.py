"""The player: real runs, right and wrong, replayed step by step, alike in every run."""

import itertools
import re
import sys
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from test_figures import has_colour

from ddpkit import LaunchError, collectives, launch
from ddpkit.lesson import page
from ddpkit.lesson.calculator import zero_calculator
from ddpkit.lesson.film import film, hop_by_hop
from ddpkit.lesson.float_explorer import float_explorer
from ddpkit.lesson.player import MOST_FRAMES, WIDTH, Stage, draw, player, world_explorer
from ddpkit.lesson.replay import replay
from ddpkit.lesson.widgets import inline


def mine(length: int = 2) -> torch.Tensor:
    """Each digit of a sum counts one rank."""
    return torch.tensor([10.0 ** dist.get_rank() * (at + 1) for at in range(length)])


def broadcast():
    collectives.broadcast(mine(), src=0)


def all_gather():
    collectives.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], mine(1))


def into_one_tensor():
    collectives.all_gather(list(torch.zeros(dist.get_world_size(), 1)), mine(1))


def ring():
    x, rank, world_size = mine(8), dist.get_rank(), dist.get_world_size()
    chunks = x.tensor_split(world_size)
    for hop in range(world_size - 1):
        outgoing = chunks[(rank - hop - 1) % world_size]
        into = chunks[(rank - hop - 2) % world_size]
        incoming = torch.empty_like(into)
        send = dist.isend(outgoing, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        send.wait()
        into += incoming
    return x.tolist()


def torch_collectives():
    dist.all_reduce(mine())
    dist.broadcast(mine(1), src=dist.get_world_size() - 1)
    parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine(1))
    dist.barrier()


def uneven_all_to_all(ranks=2, sent=(1, 2)):
    """Each rank sends 1 number to rank 0 and 2 to rank 1."""
    got = [dist.get_rank() + 1] * ranks
    dist.all_to_all_single(torch.zeros(sum(got)), mine(sum(sent)), got, list(sent[:ranks]))


def too_few_sizes():
    uneven_all_to_all(ranks=1)


def rank_1_has_too_few_sizes():
    uneven_all_to_all(ranks=2 - dist.get_rank())


def sizes_do_not_fit():
    uneven_all_to_all(sent=(1, 2 + dist.get_rank()))


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


def asks_and_goes_on():
    """Rank 0 doesn't wait in its first call, nor in its last send, which is complete."""
    x = mine(1)
    if dist.get_rank() == 0:
        handle = dist.irecv(torch.zeros(1), 1, tag=1)
        dist.send(x, 1)
        dist.recv(x, 1, tag=2)
        handle.wait()
    else:
        dist.recv(x, 0)
        dist.recv(x, 0, tag=3)


def polls():
    if dist.get_rank() == 0:
        handle = dist.irecv(torch.zeros(1), 1)
        while not handle.is_completed():
            time.sleep(0.01)


def one_raises():
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.recv(torch.zeros(1), src=1)


def sent_before_a_barrier():
    """Two messages, so that rank 0 comes to it first."""
    parts, handles = mine().split(1), []
    if dist.get_rank() == 1:
        handles = [dist.isend(part, 0) for part in parts]
    dist.barrier()
    for each in handles or parts:
        each.wait() if handles else dist.recv(each, 1)


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


def ping(rounds):
    for _ in range(rounds):
        if dist.get_rank() == 0:
            dist.send(mine(1), dst=1)
        else:
            dist.recv(torch.zeros(1), src=0)


def same_numbers():
    """Every rank has 1s; rank 0 passes on what it got, then what is left of its own."""
    x, rank = torch.ones(2), dist.get_rank()
    if rank == 0:
        dist.recv(x[:1], src=1)
        dist.send(x, dst=1)
    else:
        dist.send(x[:1], dst=0)
        dist.recv(x, src=0)


def doubled():
    """Rank 0 sends back twice what it got."""
    x = torch.ones(1)
    if dist.get_rank() == 0:
        dist.recv(x, src=1)
        x *= 2
        dist.send(x, dst=1)
    else:
        dist.send(x, dst=0)
        dist.recv(x, src=0)


@cache  # one run serves many tests
def recorded(fn, *args, world_size=2):
    """The Run of `fn`, or the error it ended in."""
    try:
        return launch(fn, *args, world_size=world_size, keep_values=True, hang_after=2)
    except LaunchError as error:
        return error


RIGHT = {
    (torch_collectives, 2): [
        "1. all_reduce(2 float32, sum): rank 0 [1, 2], rank 1 [10, 20] → [11, 22] on every rank",
        "2. broadcast(1 float32, src=1): rank 1 [10] → [10] on every rank",
        "3. all_gather(1 float32): rank 0 [1], rank 1 [10] → [1, 10] on every rank",
        "4. ranks 0 and 1 met at a barrier",
    ],
    (sent_before_a_barrier, 2): [
        "1. rank 1 sends [10] to rank 0",
        "2. rank 1 sends [20] to rank 0",
        "3. ranks 0 and 1 met at a barrier",
        "4. rank 0 receives [10] from rank 1",
        "5. rank 0 receives [20] from rank 1",
    ],
    (silence, 2): ["The ranks sent nothing."],
}
DISAGREE = "1. the ranks disagree: rank 0 calls all_reduce(2 float32, sum), "
WAIT = "1. ranks 0 and 1 wait for ever in all_reduce(2 float32, sum) for rank 2, "
WRONG = {
    (all_send, 2): [
        "1. rank 0 sends [1] to rank 1",
        "2. rank 1 sends [10] to rank 0",
        "3. rank 0 waits here for ever: rank 1 never receives its [1]",
        "4. rank 1 waits here for ever: rank 0 never receives its [10]",
    ],
    (lengths_differ, 2): [f"{DISAGREE}rank 1 calls all_reduce(3 float32, sum)"],
    (sizes_differ, 2): [
        "1. rank 0 sends [1, 2] to rank 1",
        "2. the ranks disagree: rank 0 sends 2 float32 to rank 1, which expects 3 float32",
    ],
    (nobody_receives, 2): [
        "1. rank 0 sends [1, 2] to rank 1",
        "2. rank 1 never receives [1, 2] from rank 0",
    ],
    (handle_is_dropped, 2): [
        "1. ranks 0 and 1 met at a barrier",
        "2. rank 0 sends [1] to rank 1",
        "3. rank 1 waits here for ever: rank 0 never waited for its send, "
        "and the message was dropped",
    ],
    (too_few_sizes, 2): [
        "1. rank 0 fails, as the error says",
        "2. PyTorch refuses the all_to_all of ranks 0 and 1: 1 size to send, 1 size to receive, "
        "in a group of 2",
    ],
    (rank_1_has_too_few_sizes, 2): [
        "1. rank 1 fails, as the error says",
        "2. PyTorch refuses the all_to_all of rank 1: 1 size to send, 1 size to receive, "
        "in a group of 2",
    ],
    (sizes_do_not_fit, 2): [
        "1. the ranks disagree: rank 1 sends 3 to rank 1, which expects 2",
    ],
    (one_raises, 2): [
        "1. rank 1 fails, as the error says",
        "2. rank 0 waits here in vain: no message comes from rank 1",
    ],
    (asks_and_goes_on, 2): [
        "1. rank 0 sends [1] to rank 1",
        "2. rank 1 receives [1] from rank 0",
        "3. rank 0 waits here for ever: no message comes from rank 1",
        "4. rank 1 waits here for ever: no message comes from rank 0",
    ],
    (polls, 2): ["1. rank 0 waits here for ever: no message comes from rank 1"],
    (one_stays_away, 3): [f"{WAIT}which never calls it"],
    (one_is_forgotten, 3): [
        "1. rank 0 sends [1, 2] to rank 1",
        "2. rank 1 receives [1, 2] from rank 0",
        "3. rank 2 waits here for ever: no message comes from rank 0",
    ],
}


@pytest.mark.parametrize(("fn", "world_size"), RIGHT | WRONG)
def test_what_happened(fn, world_size):
    replayed = player(recorded(fn, world_size=world_size))
    assert repr(replayed).splitlines() == (RIGHT | WRONG)[fn, world_size]
    assert has_colour(replayed.telling, page.WRONG) == ((fn, world_size) in WRONG)


def held(memory) -> list[tuple]:
    return sorted(itertools.chain(*memory.values()), key=str)


def owners(cells) -> list:
    return [owner for _, owner in cells]


def frames_of(fn, world_size=3):
    run = recorded(fn, world_size=world_size)
    return film(replay(run), run.wire), run


def test_film_knows_whose_data_it_shows():
    frames, _ = frames_of(all_gather)
    for memory in frames[-1].memory:
        assert held(memory) == [(1.0, 0), (10.0, 1), (100.0, 2)]
    assert frames[1].owners == [frames[1].event.rank]


def test_owners_are_not_found_by_comparing_numbers():
    """Equal numbers of different ranks keep their owners: the records say where they came from."""
    frames, _ = frames_of(same_numbers, 2)
    sent = [frame for frame in frames if frame.event.kind == "send"]
    assert sent[0].owners == [1]
    assert sent[1].owners == [1, 0]
    assert owners(frames[-1].memory[1][0]) == [1, 0]


def test_what_changes_after_it_arrived_is_shown():
    frames, _ = frames_of(doubled, 2)
    assert held(frames[1].memory[0]) == [(1, 1)]
    assert held(frames[2].memory[0]) == [(2, None)]


def test_cells_that_wait_for_a_message_are_blank():
    frames, _ = frames_of(one_is_forgotten)
    assert frames[-1].memory[2] == {0: [(None, 2)] * 2}


def test_film_shows_no_message_before_it_arrives():
    frames, run = frames_of(into_one_tensor)
    received = [[] for _ in run.wire]
    for frame in frames:
        event = frame.event
        if event.kind == "receive":
            received[event.peer].append(10.0**event.rank)
        for rank, memory in enumerate(frame.memory):
            shown = {value for value, _ in held(memory) if value}
            assert shown <= {10.0**rank, *received[rank]}


def test_film_of_collectives():
    frames, _ = frames_of(torch_collectives, 2)
    assert frames[-1].memory[0]["all_gather"] == [(1, 0), (10, 1)]
    assert frames[0].memory[0][0] == [(11, frozenset({0, 1})), (22, frozenset({0, 1}))]


def test_film_of_an_uneven_all_to_all():
    frames, _ = frames_of(uneven_all_to_all, 2)
    memory = [frames[-1].memory[rank]["all_to_all"] for rank in (0, 1)]
    assert memory == [[(1, 0), (10, 1)], [(2, 0), (3, 0), (20, 1), (30, 1)]]


def test_film_of_a_ring():
    frames, run = frames_of(ring)
    assert frames[0].memory[1][0] == [(10 * at, 1) for at in range(1, 9)]
    last = frames[-1].memory[0][0]
    both = frozenset({0, 2})  # 1 and 100 times the place: found from the numbers themselves
    assert last[3:6] == [(404, both), (505, both), (606, both)]
    assert owners(last) == [0] * 3 + [both] * 3 + [0] * 2
    assert [len(frame.flying) for frame in frames] == [0, 1, 2, 2, 1, 0] * 2
    *hops, end = hop_by_hop(frames, run)
    assert [frame.event.kind for frame in hops[1].sent] == ["send"] * 3
    assert hops[1].marked.keys() == {0, 1, 2}
    # The last sum is never sent: only what the rank returned shows it.
    every = frozenset({0, 1, 2})
    assert end.memory[0][0] == list(zip(run[0], [every] * 3 + [both] * 3 + [0, 0], strict=True))


def test_a_hop_shows_what_the_hops_before_it_brought():
    def everyone_to_rank_0():
        x = mine(1)
        if dist.get_rank():
            dist.send(x, 0)
            return
        for rank in (1, 2):
            dist.recv(x, rank)

    first, second, _ = hop_by_hop(*frames_of(everyone_to_rank_0))
    assert (held(first.memory[0]), held(second.memory[0])) == ([], [(10.0, 1)])


def test_hop_by_hop():
    shown = player(recorded(ring, world_size=3), by_hop=True)
    assert shown.telling is shown.look(2)[1]
    assert "line" in shown.look(1)[0]
    assert len({shown.look(step)[1].png for step in (1, 2, 3)}) == 3


def test_hop_by_hop_falls_back_to_single_steps():
    """Where there is more than messages to see, or one is missing, nothing is lumped together."""
    for fn in (torch_collectives, nobody_receives):
        run = recorded(fn, world_size=2)
        assert repr(player(run, by_hop=True)) == repr(player(run))


def test_every_frame_is_in_the_page(monkeypatch):
    """The stack and the slider are linked in the browser: stepping needs no kernel."""
    ipywidgets = pytest.importorskip("ipywidgets", reason="Jupyter isn't installed")
    links = set()
    monkeypatch.setattr(ipywidgets, "jslink", lambda *ends: links.add(ends))
    replayed = player(recorded(broadcast, world_size=3))
    controls, stack = replayed.box.children
    play, _, at, of, _, slider, pause = controls.children
    assert (slider.min, slider.max, slider.value, stack.selected_index) == (1, 4, 1, 1)
    assert (at.value, of.value, slider.continuous_update) == (1, "of 4", False)
    captions, images = zip(*(shown.children for shown in stack.children[1:]), strict=True)
    assert "of broadcast: collectives.broadcast(mine(), src=0)" in captions[0].value
    assert 'aria-label="rank 0 sends [1, 2] to rank 1"' in images[0].value
    assert len({image.value for image in images}) == 4
    assert len({replayed.look(step)[1].size for step in range(1, 5)}) == 1
    assert links == {
        ((slider, "value"), (stack, "selected_index")),
        ((play, "value"), (slider, "value")),
        ((at, "value"), (slider, "value")),
        ((pause, "value"), (play, "interval")),
    }


def test_messages_travel():
    """Up or down, from the row of their sender; those of a hop to the row where they arrive."""
    one_by_one = player(recorded(broadcast, world_size=3))
    by_hop = player(recorded(ring, world_size=3), by_hop=True)
    moves = re.compile(
        r'class="ddpkit-travels" style="--from: 0.0px, (\S+)px; --to: 0.0px, (\S+)px"'
    )
    found = [moves.findall(inline(one_by_one.look(step)[1])) for step in (1, 2, 4)]
    (one,), (two,) = map(set, found[1:])  # each with all that belongs to the message
    assert not found[0]
    assert (float(two[0]), one[1], two[1]) == (pytest.approx(2 * float(one[0])), "0.0", "0.0")
    assert float(one[0]) < 0
    down, up = dict.fromkeys(moves.findall(inline(by_hop.look(1)[1])))
    assert (down[0], float(up[1])) == ("0.0", pytest.approx(-2 * float(down[1])))
    assert float(down[1]) > 0
    assert "ddpkit-travels" not in by_hop.look(1)[1].svg.decode()


def test_the_last_step_is_told_where_nothing_is_live():
    replayed = player(recorded(torch_collectives, world_size=2))
    assert replayed.telling is replayed.look(4)[1]
    assert has_colour(replayed.telling, page.RANK_COLOURS[1])


def test_values_must_be_kept():
    with pytest.raises(ValueError, match="keep_values=True"):
        player(launch(broadcast, world_size=2))
    with pytest.raises(ValueError, match="got int"):
        player(3)


def test_long_runs_are_cut():
    replayed = player(recorded(ping, 70))
    lines = repr(replayed).splitlines()
    assert len(lines) == MOST_FRAMES + 1
    assert lines[-1] == "… and 20 more steps: a replay shows 120 at most"


def test_hops_are_counted_before_the_run_is_cut():
    whole = repr(player(recorded(ping, 70), by_hop=True)).splitlines()
    assert (len(whole), whole[-1]) == (71, "the end: what each rank has now")
    lines = repr(player(recorded(ping, 130), by_hop=True)).splitlines()
    assert lines[-2].startswith("hop 120: ")
    assert lines[-1] == "… and 11 more steps: a replay shows 120 at most"


def test_long_buffers_fit_the_page():
    """What has no room is left out, and what has is as before."""
    frames, _ = frames_of(ring)
    for frame in frames:
        for buffers in frame.memory:
            buffers["long"] = [(0.125, 0)] * 200
    stage = Stage(frames, 3)
    assert stage.height <= page.TALLEST
    assert stage.spots[0]["long"][2] == 3 * stage.per_line
    picture = draw(frames[0], stage, 1)
    width, height = picture.figure.get_size_inches() * page.DPI
    assert (width, height) == pytest.approx((WIDTH, stage.height))


def test_every_one_of_many_ranks_has_room_for_its_numbers_and_words():
    frames, _ = frames_of(ring)
    for frame in frames:
        frame.memory = [{"x": [(1.0, 0)]}] * 24
        frame.status = dict.fromkeys(range(24), "waits here for ever")
    stage = Stage(frames, 24)
    assert all("x" in spots for spots in stage.spots)
    assert stage.pitch >= stage.tall + stage.said > page.ROW
    assert stage.height > stage.title + 24 * stage.pitch > page.TALLEST


def test_no_two_arrows_that_pass_each_other_share_a_place():
    frames, _ = frames_of(ring)
    stage = Stage(frames, 3)
    ways = list(itertools.permutations(range(3), 2))
    for one, other in itertools.combinations(ways, 2):
        apart = max(one) <= min(other) or max(other) <= min(one)
        assert apart or abs(stage.way(*one) - stage.way(*other)) > 10


def test_without_ipywidgets(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for widget in (world_explorer(), zero_calculator(), float_explorer()):
        assert sorted(widget._repr_mimebundle_()[0]) == ["image/png", "text/plain"]
