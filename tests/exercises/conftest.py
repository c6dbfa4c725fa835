"""Which exercises, mistakes and other right answers the tests of a topic's file are about."""

import importlib
import importlib.util

import pytest

from ddpkit.exercises import checker
from ddpkit.exercises.checker import Exercise

QUICK = 2  # mistakes of an exercise, the commonest; the others are `wide`
checker.PATIENCE_S = 120.0  # a busy machine is slow, not hung


def exercises_of(topic: str) -> list[Exercise]:
    module = importlib.import_module(f"ddpkit.exercises.{topic}")
    return [value for value in vars(module).values() if isinstance(value, Exercise)]


def answers(topic: str, which: str) -> list[tuple]:
    """List those of tests/answers: RIGHT in another way; WRONG beside right values, and told so."""
    if importlib.util.find_spec(f"answers.{topic}") is None:
        return []
    return getattr(importlib.import_module(f"answers.{topic}"), which, [])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    topic = metafunc.module.__name__.rpartition("test_")[2]
    exercises = {exercise.name: exercise for exercise in exercises_of(topic)}
    if "mistake" in metafunc.fixturenames:
        pairs = []
        for name, exercise in exercises.items():
            for place, wrong in enumerate(exercise.mistakes):
                marks = [pytest.mark.wide] * (place >= QUICK)
                pairs.append(pytest.param(exercise, wrong, marks=marks, id=f"{name}-{wrong.name}"))
        metafunc.parametrize(("exercise", "mistake"), pairs)
    elif "wrong" in metafunc.fixturenames:
        others = []
        for name, answer, says in answers(topic, "WRONG"):
            others.append(
                pytest.param(exercises[name], answer, says, id=f"{name}-{answer.__name__}")
            )
        metafunc.parametrize(("exercise", "wrong", "says"), others)
    elif "right" in metafunc.fixturenames:
        others = []
        for name, answer in answers(topic, "RIGHT"):
            others.append(pytest.param(exercises[name], answer, id=f"{name}-{answer.__name__}"))
        metafunc.parametrize(("exercise", "right"), others)
    elif "exercise" in metafunc.fixturenames:
        metafunc.parametrize("exercise", exercises.values(), ids=exercises)
