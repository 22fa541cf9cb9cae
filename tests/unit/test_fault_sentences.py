"""The fault sentences of `--inject`."""

from __future__ import annotations

import pytest

from actors.runtime.fault_spec import Fault
from pipelines.errors import UserError
from pipelines.run.fault_sentences import parse_faults


def test_slow_fault_has_a_factor() -> None:
    faults, draining_workers = parse_faults(
        ["slow worker 2 by 3x at step 30", "slow workers 0, 1 by 1.5x at step 4"]
    )
    assert faults == (
        Fault("slow", "w2", 30, factor=3.0),
        Fault("slow", "w0", 4, factor=1.5),
        Fault("slow", "w1", 4, factor=1.5),
    )
    assert draining_workers == ()


def test_faults_of_a_machine_need_no_step() -> None:
    faults, _ = parse_faults(
        ["slow link of worker 2 by 10x", "ecc error in worker 1", "ecc error in worker 1 at step 9"]
    )
    assert faults == (
        Fault("slow_link", "w2", 0, factor=10.0),
        Fault("ecc", "w1", 0),
        Fault("ecc", "w1", 9),
    )


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("slow link of worker 2", "`slow` needs a factor over 1"),
        ("slow link of worker 2 by 10x at step 3", "is not understood"),
        ("slow worker 2 by 3x", "is not understood"),
        ("kill worker 2", "is not understood"),
        ("ecc error in worker 1 by 2x", "other faults take none"),
        ("slow worker 2 at step 30", "`slow` needs a factor over 1"),
        ("slow worker 2 by 1x at step 30", "`slow` needs a factor over 1"),
        ("kill worker 2 by 3x at step 30", "`slow` needs a factor over 1"),
        ("kill worker 2 by 1x at step 30", "`slow` needs a factor over 1"),
        ("slow worker 2 by 3x in vote at step 30", "leave out the moment"),
        ("slow worker 2 by threex at step 30", "slow worker 2 by 3x at step 30"),
    ],
)
def test_invalid_fault_sentence_is_refused_in_one_line(sentence: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_faults([sentence])
    assert message in str(error.value) and "\n" not in str(error.value)
