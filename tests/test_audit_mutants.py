"""The audit catches mutants of the library: some here, all of them with `make test-all`."""

import audit_mutants
import pytest
from audit_mutants import TARGETS, caught_by, mutants

EXPECTED = {  # {target: {the beginning of a mutant: what catches it}}
    "average_gradients": {
        "division dropped": ["twin ×3"],
        "all_reduce twice": ["twin ×3", "budget"],
    },
    "broadcast_module": {"broadcast twice": ["budget"]},
    "CopyToRanks.backward": {"all_reduce dropped": ["twin", "agreement", "budget"]},
    "sum_copies": {"all_reduce without": ["hang"]},
}
ALL = [(target, *mutant) for target in TARGETS for mutant in mutants(target)]


def name(value) -> str:
    if isinstance(value, audit_mutants.Target):
        return value.where[1]
    return value.split(":")[0] if isinstance(value, str) and "\n" not in value else ""


def test_a_mutant_changes_one_statement():
    found = mutants(TARGETS[0])
    assert [what.split(":")[0] for what, _ in found] == [
        "all_reduce dropped",
        "all_reduce twice",
        "all_reduce takes the maximum",
        "all_reduce without the last rank",
        "division dropped",
        "division twice",
    ]
    assert len({source for _, source in found}) == 6


@pytest.mark.parametrize("target", EXPECTED)
def test_the_instrument_that_catches_a_mutant(target):
    chosen = next(each for each in TARGETS if each.where[1] == target)
    for begins, instruments in EXPECTED[target].items():
        (source,) = [code for what, code in mutants(chosen) if what.startswith(begins)]
        assert caught_by(chosen, source) == instruments


@pytest.mark.slow
@pytest.mark.parametrize(("target", "what", "source"), ALL, ids=name)
def test_every_mutant_is_caught(target, what, source):
    assert caught_by(target, source), what
