"""Two commands in one folder, the second started while the first may be at work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from tests.fuzz.fork_server import Outcome, run, start
from tests.fuzz.soundness import unsound
from tests.fuzz.world import World

LIMIT_S = 10.0
MOST_DELAY_S = 1.0
# What a second start may change of a command that writes: nothing, another build of the same name, or a replacement.
CHANGES = {
    "train": ((), ("fresh=true",), ("max_steps=3",)),
    "bench": ((), ("fresh=true",), ("max_new_tokens=4",)),
    "tune": ((), ("fresh=true",), ("max_new_tokens=4",)),
    "cost": ((), ("fresh=true",), ("batch=[2]",)),
    "parity": ((), ("contexts=1",)),
    "export": ((), ("weights=last",)),
    "report": ((),),
    "responses": ((), ("fresh=true",), ("max_new_tokens=4",)),
    "acceptance": ((), ("fresh=true",), ("part_rows=1",)),
    "activations": ((), ("fresh=true",), ("row_tokens=16",)),
    "datastore": ((), ("fresh=true",), ("keep_tokens=600",)),  # two documents
}
# What another command reads of one that may still be at work.
READS = {
    "train": (("export", "run=run", "out=second"), ("report", "runs=."), ("parity", "run=run")),
    "bench": (("report", "runs=."), ("cost", "results=bench/results.json", "results_names.vanilla=pld")),
    "tune": (("report", "runs=."),),
    "export": (("generate", "method=exported"),),
    "responses": (("acceptance", "responses=responses"),),
    "acceptance": (("datastore",),),
    "activations": (("train", "data=offline", "data.path=features"),),
    "datastore": (("generate", "method=rest", "datastore=datastore"), ("datastore", "inspect=datastore")),
}
# What another command writes to the place of a build that may still be at work.
WRITES = {
    "responses": (("cost", "out=responses"), ("bench", "out=responses", "fresh=true")),
    "acceptance": (("cost", "out=labels"), ("export", "out=labels")),
    "activations": (("cost", "out=features"), ("parity", "out=features")),
    "datastore": (("cost", "out=datastore"), ("export", "out=datastore")),
}
# The first command once more, after both: it works, or what stands there is finished, or of the second's options.
ENDS = ("finished", "exists", "another config", "differs in")


@dataclass(frozen=True)
class PairCase:
    """Two commands, and the seconds between their starts."""

    first: str
    second: tuple[str, ...]  # its name, and options in place of its own
    delay_s: float
    must_refuse: bool = False

    @property
    def command(self) -> str:
        return f"{self.first}+{self.second[0]}"


def pair_cases() -> st.SearchStrategy[PairCase]:
    def of(first: str) -> st.SearchStrategy[PairCase]:
        others = (*READS.get(first, ()), *WRITES.get(first, ()))
        seconds = [(first, *changes) for changes in CHANGES[first]] * 2 + list(others)
        delays = st.just(0.0) | st.floats(0, MOST_DELAY_S).map(lambda s: round(s, 3))
        return st.builds(PairCase, st.just(first), st.sampled_from(seconds), delays)

    return st.sampled_from(sorted(CHANGES)).flatmap(of)


def try_pair(case: PairCase, world: World, folder: Path) -> tuple[Outcome, str | None]:
    """Start both. Returns the outcome of the faulty one, or of the first, and what is wrong."""
    first = (case.first, *world.commands[case.first])
    name, *changed = case.second
    names = {change.split("=")[0] for change in changed}
    own = [] if "inspect" in names else [t for t in world.commands[name] if t.lstrip("+").split("=")[0] not in names]
    running = [start(first, folder)]
    time.sleep(case.delay_s)
    running.append(start((name, *own, *changed), folder, ".output-2"))
    outcomes = [one.wait(LIMIT_S) for one in running]
    for outcome in outcomes:
        if outcome.fault:
            return outcome, outcome.fault
    if all(outcome.code for outcome in outcomes):
        return outcomes[1], "both refused"
    if fault := unsound(folder):
        return outcomes[1], fault
    again = run(first, folder)
    if again.fault or (again.code == 2 and not any(end in again.output for end in ENDS)):
        return again, again.fault or "a third start neither works nor finds it finished"
    return outcomes[0], unsound(folder)
