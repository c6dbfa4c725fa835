"""Answers to the exercises of notebook 00: wrong ones, with what the verdict must say, and other right ones."""

import time

import torch.distributed as dist


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


# say_hello


def hello_unordered():
    print(f"hello from rank {_rank()} of {_size()}")


def hello_by_the_clock():
    time.sleep(0.4 * _rank())
    print(f"hello from rank {_rank()} of {_size()}")


def hello_all_from_rank_0():
    if _rank() == 0:
        for rank in range(_size()):
            print(f"hello from rank {rank} of {_size()}")


def hello_every_turn():
    for _ in range(_size()):
        print(f"hello from rank {_rank()} of {_size()}")
        dist.barrier()


def hello_barrier_on_one_rank():
    for turn in range(_size()):
        if turn == _rank():
            print(f"hello from rank {_rank()} of {_size()}")
            if _rank() == 0:
                dist.barrier()


def hello_wrong_words():
    for turn in range(_size()):
        if turn == _rank():
            print(f"Hello from rank {_rank()}")
        dist.barrier()


def hello_barrier_then_clock():
    dist.barrier()
    time.sleep(0.4 * _rank())
    print(f"hello from rank {_rank()} of {_size()}")


def hello_counts_barriers_wrongly():
    for _ in range(_rank()):
        dist.barrier()
    print(f"hello from rank {_rank()} of {_size()}")


# neighbours


def neighbours_open():
    return _rank() - 1, _rank() + 1


def neighbours_swapped():
    return (_rank() + 1) % _size(), (_rank() - 1) % _size()


def neighbours_of_four():
    return (_rank() - 1) % 4, (_rank() + 1) % 4


def neighbours_off_by_one():
    return (_rank() - 1) % (_size() - 1), (_rank() + 1) % (_size() - 1)


def neighbours_right_only():
    return (_rank() + 1) % _size()


WRONG = [  # exercise, answer, what the verdict must say
    ("say_hello", hello_unordered, "nothing makes a rank wait"),
    ("say_hello", hello_by_the_clock, "waited by the clock"),
    ("say_hello", hello_all_from_rank_0, "only when it is its turn"),
    ("say_hello", hello_every_turn, "only when it is its turn"),
    ("say_hello", hello_barrier_then_clock, "waited by the clock"),
    ("say_hello", hello_counts_barriers_wrongly, "which has returned"),
    ("say_hello", hello_barrier_on_one_rank, "which has returned"),
    ("say_hello", hello_wrong_words, "must read exactly so"),
    ("neighbours", neighbours_open, "the ring must close"),
    ("neighbours", neighbours_swapped, "the wrong way round"),
    ("neighbours", neighbours_of_four, "There is no rank 3. Count with the size of this world"),
    ("neighbours", neighbours_off_by_one, "the size of this world"),
    ("neighbours", neighbours_right_only, "Return two ranks"),
]

RIGHT = []
