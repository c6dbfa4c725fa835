"""Answers to notebook 10's exercises on schedules, right in another way than the reference."""


class Action:
    """As PyTorch's, an object that says what it is."""

    def __init__(self, stage, kind, micro_batch):
        self.said = f"{stage}{kind}{micro_batch}"

    def __str__(self):
        return self.said


def gpipe_of_objects(stages, micro_batches):
    both = [(kind, i) for kind in "FB" for i in range(micro_batches)]
    return tuple(tuple(Action(stage, *each) for each in both) for stage in range(stages))


def one_f_one_b_counting(stages, micro_batches):
    schedule = []
    for stage in range(stages):
        actions, forward, backward = [], 0, 0
        while backward < micro_batches:
            if forward < min(micro_batches, backward + stages - stage):
                actions.append(f"{stage}F{forward}")
                forward += 1
            else:
                actions.append(f"{stage}B{backward}")
                backward += 1
        schedule.append(actions)
    return schedule


RIGHT = [
    ("gpipe", gpipe_of_objects),
    ("one_f_one_b", one_f_one_b_counting),
    ("published_1f1b", one_f_one_b_counting),
]
