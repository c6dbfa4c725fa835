"""The exercises of notebook 05."""

from ddpkit import exercises as check
from ddpkit import mixed_precision

from .every import *  # noqa: F403


def test_the_solutions_are_the_librarys():
    assert check.LossScaler.reference is mixed_precision.LossScaler
    assert check.master_step.reference is mixed_precision.master_step


def test_an_inf_in_the_weights_is_not_a_loss_changed_in_place():
    """The loss is NaN then, which isn't equal to itself."""

    class StepsAlongAnything(mixed_precision.LossScaler):
        def step(self, optimizer):
            if self.overflow is None:
                self.unscale_(optimizer)
            optimizer.step()

    told = check.LossScaler(StepsAlongAnything).text
    assert (
        "weights moved by inf" in told or "weights moved by 0, 0, 0, -inf" in told or "inf" in told
    )
    assert "changed in place" not in told


def test_what_is_still_empty_is_named():
    class HalfWritten(mixed_precision.LossScaler):
        def update(self):
            """Halve, or double."""
            ...  # noqa: PIE790

    assert "update is still empty" in check.LossScaler(HalfWritten).text
