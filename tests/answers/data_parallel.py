"""Answers to the exercises of notebook 03: wrong ones, with what the verdict must say, and other right ones."""

import torch
import torch.distributed as dist


def _rank():
    return dist.get_rank()


def _size():
    return dist.get_world_size()


# average_gradients


def _trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _average(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= _size()


def average_gradients_sums(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)


def average_gradients_divides_twice(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        _average(parameter)


def average_gradients_divides_by_2(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def average_gradients_divides_on_rank_0(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)
        if _rank() == 0:
            parameter.grad /= _size()


def average_gradients_averages_the_parameters(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.data)
        parameter.data /= _size()


def average_gradients_adds_up_the_parameters(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.data)


def average_gradients_broadcasts(module):
    for parameter in _trained(module):
        dist.broadcast(parameter.grad, 0)


def average_gradients_skips_biases(module):
    for parameter in _trained(module):
        if parameter.dim() > 1:
            _average(parameter)


def average_gradients_in_a_new_tensor(module):
    for parameter in _trained(module):
        mean = parameter.grad / _size()
        dist.all_reduce(mean)


def average_gradients_of_rank_1_only(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad.mul_(_rank() == 1))


def average_gradients_takes_them_away(module):
    for parameter in _trained(module):
        _average(parameter)
        parameter.grad = None


def average_gradients_stumbles_over_the_frozen(module):
    for parameter in module.parameters():
        _average(parameter)


def average_gradients_thaws_the_frozen(module):
    for parameter in module.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _average(parameter)


def _layer_by_layer(module):
    """With the tied weight twice."""
    every = [parameter for layer in module.modules() for parameter in layer.parameters(recurse=False)]
    return [parameter for parameter in every if parameter.requires_grad]


def average_gradients_sends_tied_twice(module):
    for parameter in _layer_by_layer(module):
        _average(parameter)


def average_gradients_adds_tied_twice(module):
    for parameter in _layer_by_layer(module):
        dist.all_reduce(parameter.grad)
    for parameter in _trained(module):
        parameter.grad /= _size()


def _average_flat(parameters, unpacked):
    """All in one message, cut up again in the order of `unpacked`."""
    flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= _size()
    for parameter, part in zip(unpacked, flat.split([parameter.numel() for parameter in unpacked]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))


def average_gradients_mixes_up_the_parts(module):
    tokens, weight, bias = _trained(module)
    _average_flat([tokens, weight, bias], [weight, tokens, bias])


def average_gradients_never_waits(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        dist.all_reduce(parameter.grad, async_op=True)


def average_gradients_number_by_number(module):
    for parameter in _trained(module):
        parameter.grad /= _size()
        for number in parameter.grad.flatten().split(1):
            dist.all_reduce(number)


def average_gradients_reduces_and_broadcasts(module):
    for parameter in _trained(module):
        dist.reduce(parameter.grad, 0)
        dist.broadcast(parameter.grad, 0)
        parameter.grad /= _size()


def average_gradients_reduces(module):
    for parameter in _trained(module):
        dist.reduce(parameter.grad, 0)
        parameter.grad /= _size()


def average_gradients_divides_by_4(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 4


# sum_or_mean


def _all_rows(rows):
    everybodys = torch.tensor(rows)
    dist.all_reduce(everybodys)
    return everybodys.item()


def _add_up(module, weight):
    for parameter in _trained(module):
        parameter.grad *= weight
        dist.all_reduce(parameter.grad)


def sum_or_mean_always_divides(module, reduction, rows):
    _add_up(module, 1 / _size())


def sum_or_mean_never_divides(module, reduction, rows):
    _add_up(module, 1)


def sum_or_mean_divides_the_sum_by_rows(module, reduction, rows):
    _add_up(module, (1 if reduction == "sum" else rows) / _all_rows(rows))


def sum_or_mean_swapped(module, reduction, rows):
    _add_up(module, rows / _all_rows(rows) if reduction == "sum" else 1)


def sum_or_mean_of_means(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 1 / _size())


def sum_or_mean_divides_by_own_rows(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows)
    if reduction == "mean":
        for parameter in _trained(module):
            parameter.grad /= rows


def sum_or_mean_rows_of_this_rank_only(module, reduction, rows):
    all_rows = torch.tensor(rows)
    _add_up(module, 1 if reduction == "sum" else rows / all_rows.item())


def sum_or_mean_forgets_to_divide(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows)


def sum_or_mean_forgets_to_weigh(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 1 / _all_rows(rows))


def sum_or_mean_divides_weighed_by_ranks(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows / _size())


def sum_or_mean_divides_by_own_rows_and_ranks(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else rows)
    if reduction == "mean":
        for parameter in _trained(module):
            parameter.grad /= rows * _size()


def sum_or_mean_leaves_when_it_has_none(module, reduction, rows):
    if rows:
        _add_up(module, 1 if reduction == "sum" else rows / _all_rows(rows))


def sum_or_mean_leaves_sums_alone(module, reduction, rows):
    if reduction == "mean":
        _add_up(module, rows / _all_rows(rows))


def sum_or_mean_leaves_means_alone(module, reduction, rows):
    if reduction == "sum":
        _add_up(module, 1)


def sum_or_mean_adds_tied_twice(module, reduction, rows):
    for parameter in _layer_by_layer(module):
        dist.all_reduce(parameter.grad)


def sum_or_mean_by_guess(module, reduction, rows):
    _add_up(module, 1 if reduction == "sum" else 7)


# HookedDDP


class HookedAsFound(torch.nn.Module):
    """The class as notebook 03 shows it, with its bug."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, gradient):
        dist.all_reduce(gradient.data)
        gradient.data /= dist.get_world_size()

    def synchronize(self):
        pass

    def forward(self, *inputs):
        return self.module(*inputs)


class HookedAveragesBoth(HookedAsFound):
    def average(self, parameter):
        _average(parameter)
        super().average(parameter)


class HookedForgetsToDivide(HookedAsFound):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)


class HookedDividesTwice(HookedAsFound):
    def average(self, parameter):
        parameter.grad /= _size()
        _average(parameter)


class HookedForTwoRanks(HookedAsFound):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


class HookedStepsItself(HookedAsFound):
    def average(self, parameter):
        _average(parameter)
        parameter.data -= parameter.grad


class HookedDoesNotWait(HookedAsFound):
    def average(self, parameter):
        parameter.grad /= _size()
        dist.all_reduce(parameter.grad, async_op=True)


class HookedForOneStep(HookedAsFound):
    def average(self, parameter):
        self.averaged = getattr(self, "averaged", 0) + 1
        if self.averaged <= 2:
            _average(parameter)


class HookedOnTheLast(HookedAsFound):
    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
        _trained(module)[-1].register_post_accumulate_grad_hook(_average)


class HookedOnCopies(HookedAsFound):
    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
        for parameter in _trained(module):
            self.where(parameter).register_hook(self.mean)

    def where(self, parameter):
        return parameter.detach().clone().requires_grad_()

    def mean(self, gradient):
        mean = gradient / _size()
        dist.all_reduce(mean)
        return mean


WRONG = [  # exercise, answer, what the verdict must say
    ("average_gradients", average_gradients_sums, "tokens.weight.grad is the sum over the ranks: divide"),
    ("average_gradients", average_gradients_divides_twice, "was divided by 4, on 2 ranks. Twice, before"),
    ("average_gradients", average_gradients_divides_by_4, "Or by a number of your own?"),
    ("average_gradients", average_gradients_divides_by_2, "was divided by 2, on 4 ranks"),
    ("average_gradients", average_gradients_divides_on_rank_0, "Every rank must divide, not only those below it"),
    ("average_gradients", average_gradients_averages_the_parameters, "you averaged the parameters"),
    ("average_gradients", average_gradients_adds_up_the_parameters, "tokens.weight itself was 7 and is 14"),
    ("average_gradients", average_gradients_broadcasts, "what the others learned from their data is lost"),
    ("average_gradients", average_gradients_skips_biases, "Was it skipped? Every parameter that is trained"),
    ("average_gradients", average_gradients_in_a_new_tensor, "the mean must end up in .grad itself, in place"),
    ("average_gradients", average_gradients_of_rank_1_only, "tokens.weight.grad is rank 1's own gradient"),
    ("average_gradients", average_gradients_takes_them_away, "rank 0 has no gradients, expected tokens.weight.grad 11"),
    ("average_gradients", average_gradients_takes_them_away, "tokens.weight.grad is gone"),
    ("average_gradients", average_gradients_stumbles_over_the_frozen, "positions isn't trained, so its .grad is None"),
    ("average_gradients", average_gradients_thaws_the_frozen, "positions isn't trained and has no gradient"),
    ("average_gradients", average_gradients_sends_tied_twice, "one parameter, sent twice"),
    ("average_gradients", average_gradients_adds_tied_twice, "did it have its turn twice?"),
    ("average_gradients", average_gradients_mixes_up_the_parts, "holds the mean of body.weight.grad"),
    ("average_gradients", average_gradients_never_waits, "never waited for it"),
    ("average_gradients", average_gradients_number_by_number, "made 10 calls for 3 gradients"),
    ("average_gradients", average_gradients_reduces, "Only rank 0 has the sum: you called dist.reduce"),
    ("average_gradients", average_gradients_reduces_and_broadcasts, "what does an all_reduce of each gradient not do"),
    ("sum_or_mean", sum_or_mean_always_divides, "A sum over all rows is divided by nothing"),
    ("sum_or_mean", sum_or_mean_never_divides, "the ranks' means, added up"),
    ("sum_or_mean", sum_or_mean_divides_the_sum_by_rows, "That makes a mean of it; the loss is a sum"),
    ("sum_or_mean", sum_or_mean_swapped, "Are the two swapped?"),
    ("sum_or_mean", sum_or_mean_of_means, "every rank counts alike, though they have 1 to 3 rows"),
    ("sum_or_mean", sum_or_mean_divides_by_own_rows, "divided by this rank's 3 rows. All ranks have 4 together"),
    ("sum_or_mean", sum_or_mean_rows_of_this_rank_only, "the rows of all ranks, added up, too, with an all_reduce"),
    ("sum_or_mean", sum_or_mean_divides_by_own_rows_and_ranks, "by the number of ranks times this rank's 3 rows"),
    (
        "sum_or_mean",
        sum_or_mean_leaves_when_it_has_none,
        "sum over 4 and 0 rows: deadlock: rank 0 waits",
    ),
    ("sum_or_mean", sum_or_mean_forgets_to_divide, "weighed with rows, and never divided"),
    ("sum_or_mean", sum_or_mean_forgets_to_weigh, "no rank's mean was multiplied by its own rows"),
    ("sum_or_mean", sum_or_mean_divides_weighed_by_ranks, "then divided by the number of ranks"),
    ("sum_or_mean", sum_or_mean_leaves_sums_alone, "this rank's own gradient. Those of all ranks add up"),
    ("sum_or_mean", sum_or_mean_leaves_means_alone, "this rank's own gradient. Those of all ranks belong in it"),
    ("sum_or_mean", sum_or_mean_adds_tied_twice, "did it have its turn twice?"),
    ("sum_or_mean", sum_or_mean_by_guess, "of one process with all 4 rows"),
    ("HookedDDP", HookedAsFound, "What your hook gave to all_reduce is 7, on every rank alike"),
    ("HookedDDP", HookedAveragesBoth, "handed 32 bytes to all_reduce where its gradients have 16"),
    ("HookedDDP", HookedForgetsToDivide, "weight.grad is the sum over the ranks: divide"),
    ("HookedDDP", HookedDividesTwice, "was divided by 4, on 2 ranks. Twice, before"),
    ("HookedDDP", HookedForTwoRanks, "was divided by 2, on 4 ranks"),
    ("HookedDDP", HookedStepsItself, "weight itself was 7 and is -14"),
    ("HookedDDP", HookedDoesNotWait, "never waited for it"),
    ("HookedDDP", HookedForOneStep, "The first step was right"),
    ("HookedDDP", HookedOnTheLast, "weight.grad is still rank 0's own"),
    ("HookedDDP", HookedOnCopies, "on the module's own parameters, not on copies"),
]


# Right, though not written as the reference is.


def average_gradients_in_one_message(module):
    _average_flat(_trained(module), _trained(module))


def average_gradients_by_avg(module):
    for parameter in _trained(module):
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def average_gradients_all_at_once(module):
    works = []
    for parameter in _trained(module):
        parameter.grad /= _size()
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()


def average_gradients_backwards(module):
    for parameter in reversed(list(module.parameters())):
        if parameter.grad is not None:
            mean = parameter.grad.clone()
            dist.all_reduce(mean)
            parameter.grad = mean / _size()


def sum_or_mean_by_parameter(module, reduction, rows):
    for parameter in _trained(module):
        if reduction == "mean":
            parameter.grad *= rows
        dist.all_reduce(parameter.grad)
        if reduction == "mean":
            parameter.grad /= _all_rows(rows)


class HookedOnTensors(HookedOnCopies):
    """register_hook is given the gradient, and what it returns takes its place."""

    def where(self, parameter):
        return parameter


class HookedBeginsAlike(HookedAsFound):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def average(self, parameter):
        _average(parameter)


RIGHT = [
    ("average_gradients", average_gradients_in_one_message),
    ("average_gradients", average_gradients_by_avg),
    ("average_gradients", average_gradients_all_at_once),
    ("average_gradients", average_gradients_backwards),
    ("sum_or_mean", sum_or_mean_by_parameter),
    ("HookedDDP", HookedOnTensors),
    ("HookedDDP", HookedBeginsAlike),
]
