"""A command that is killed (SIGKILL) at five random moments and run again ends with what an undisturbed run makes."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from tests.slow.commands import jobs, run
from tests.slow.compare import differences

KILLS = 5
JOBS = tuple(jobs(Path()))
DONE = ("is finished", "exists already")  # what a command says that was killed after its last step


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_five_kills_change_nothing(name, inputs, tmp_path):
    job, chance = jobs(inputs)[name], Random(name)
    whole, killed, n_kills = tmp_path / "whole", tmp_path / "killed", 0
    whole.mkdir()
    undisturbed = run(job, whole)
    assert undisturbed.code == 0, undisturbed.output
    while n_kills < KILLS:  # it may end before it is killed as often; then once more from nothing
        shutil.rmtree(killed, ignore_errors=True)
        killed.mkdir()
        ended = False
        while not ended:
            limit_s = chance.uniform(0, undisturbed.elapsed_s) if n_kills < KILLS else 10 * undisturbed.elapsed_s + 60
            outcome = run(job, killed, limit_s=limit_s)
            ended = outcome.code is not None
            n_kills += not ended
        finished = outcome.code == 2 and any(words in outcome.output for words in DONE)
        assert finished or outcome.code == 0, outcome.output
        assert differences(whole, killed) == []
