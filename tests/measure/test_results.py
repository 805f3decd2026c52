"""The measures of a benchmark, worked out by hand from two questions."""

from dataclasses import replace

import pytest

from spectrain.data.prompts import Question
from spectrain.decoding import Generation
from spectrain.decoding.generation import Choice
from spectrain.measure.results import BASELINE, QuestionRow, question_row, summarise
from spectrain.target import Source

ROOT, INPUT, LOGITS = int(Source.ROOT), int(Source.INPUT), int(Source.LOGITS)
KINDS = {BASELINE: "method", "lookup": "method", "hf_generate": "peer"}


def by_source(**counts) -> list[int]:
    return [counts.get(source.name.lower(), 0) for source in Source]


def stage_times(**seconds) -> dict[str, float]:
    return {stage: seconds.get(stage, 0.0) for stage in ("draft", "forward", "verify", "commit", "other")}


def turn(**changes) -> Generation:
    """Six tokens: one of prefill, then steps of 2, 1 and 2: three drafted ones accepted."""
    generation = Generation(
        tokens=[1, 2, 3, 4, 5, 6],
        finish_reason="length",
        target_forwards=3,
        accepted=[1, 0, 2],
        drafted=[4, 0, 4],
        drafted_by_source=by_source(input=6, logits=2),
        steps_by_depth=[2, 2, 1],
        retrieval_hits=2,
        sources=[ROOT, INPUT, ROOT, ROOT, INPUT, LOGITS],
        elapsed_s=2.0,
        prefill_s=0.5,
        time_s=stage_times(draft=0.5, forward=1.0),
    )
    return replace(generation, **changes)


def row(method: str, question: str, *turns: Generation, category: str = "maths") -> QuestionRow:
    asked = Question(question, category, ("x",) * len(turns))
    return question_row(asked, method, [[0] * 7] * len(turns), turns, str, peak_memory_bytes=1000)


def plain(tokens: list[int], seconds: float) -> Generation:
    n = len(tokens) - 1
    return turn(
        tokens=tokens,
        target_forwards=n,
        accepted=[0] * n,
        drafted=[0] * n,
        drafted_by_source=by_source(),
        steps_by_depth=[],
        retrieval_hits=0,
        sources=[ROOT] * len(tokens),
        prefill_s=0.0,
        time_s=stage_times(forward=seconds),
    )


SAME = [1, 2, 3, 4, 5, 6]
ROWS = [
    row(BASELINE, "a", plain(SAME, 4.0)),
    row(BASELINE, "b", plain(SAME, 4.0), category="code"),
    row("lookup", "a", turn()),
    row("lookup", "b", turn(tokens=[1, 2, 3, 4, 5, 9]), category="code"),
]


def test_two_turns_make_one_row():
    two = row("lookup", "a", turn(), turn(steps_by_depth=[3]))
    assert two.turns == 2
    assert two.n_tokens == 12
    assert two.accepted == [1, 0, 2, 1, 0, 2]
    assert two.steps_by_depth == [5, 2, 1]
    assert two.drafted_by_source == {"input": 12, "logits": 4}
    assert two.accepted_by_source == {"input": 4, "logits": 2}
    assert two.seconds == 4.0
    # Each turn's first token is its prefill's: (12 - 2) / 6.
    assert summarise([two], {"lookup": "method"}, True, True)["lookup"]["mean_accepted"] == pytest.approx(10 / 6)


def test_measures_of_a_method():
    lookup = summarise(ROWS, KINDS, greedy=True, float32=True)["lookup"]
    assert lookup["mean_accepted"] == pytest.approx(10 / 6)
    assert lookup["tokens_per_s_micro"] == pytest.approx(12 / 4.0)
    assert lookup["tokens_per_s_macro"] == pytest.approx(3.0)
    assert lookup["speedup"] == pytest.approx(3.0 / (12 / 8))
    assert lookup["time_share"] == {"draft": 1 / 3, "forward": 2 / 3, "verify": 0, "commit": 0, "other": 0}
    assert lookup["acceptance_by_source"] == {
        "input": {"drafted": 12, "accepted": 4},
        "logits": {"drafted": 4, "accepted": 2},
    }
    # Of a question's steps 2 drafted at depth 1 and accepted there, 2 at depth 2 (1 accepted), 1 at depth 3.
    assert lookup["acceptance_by_position"] == [1.0, 0.5, 0.0]
    assert lookup["discard_rate"] == pytest.approx((16 - 6) / 12)
    assert lookup["verification_rate"] == pytest.approx(6 / 12)
    assert lookup["retrieval_hit_rate"] == pytest.approx(4 / 6)
    assert lookup["by_category"]["code"]["questions"] == 1


def test_lossless_is_said_of_float32_and_of_texts_that_no_method_may_change():
    summary = summarise(ROWS, KINDS, greedy=True, float32=True)
    assert (summary[BASELINE]["lossless"], summary[BASELINE]["greedy_mismatches"]) == (True, 0)
    assert (summary["lookup"]["lossless"], summary["lookup"]["greedy_mismatches"]) == (False, 1)
    half = summarise(ROWS, KINDS, greedy=True, float32=False)["lookup"]
    assert (half["lossless"], half["greedy_mismatches"]) == (None, 1)
    sampled = summarise(ROWS, KINDS, greedy=False, float32=True)["lookup"]
    assert (sampled["lossless"], sampled["greedy_mismatches"]) == (None, None)
    shared = summarise(ROWS, {**KINDS, "lookup": "method"}, greedy=False, float32=True, shares_noise=True)["lookup"]
    assert (shared["lossless"], shared["greedy_mismatches"]) == (False, 1)
    peer = summarise(ROWS, {**KINDS, "lookup": "peer"}, greedy=False, float32=True, shares_noise=True)["lookup"]
    assert (peer["lossless"], peer["greedy_mismatches"]) == (None, None)


def test_a_method_that_drafts_from_no_table_or_store_has_no_hit_rate():
    guessing = turn(drafted_by_source=by_source(draft=8), retrieval_hits=0)
    rows = [row("lookup", "a", guessing), row("lookup", "b", guessing)]
    assert summarise(rows, {"lookup": "method"}, True, True)["lookup"]["retrieval_hit_rate"] is None


def test_baseline_looks_nothing_up_and_peers_show_no_steps():
    peer = row("hf_generate", "a", turn(accepted=[], drafted=[], steps_by_depth=[], sources=[]))
    summary = summarise([*ROWS, peer], KINDS, True, True)
    assert summary[BASELINE]["retrieval_hit_rate"] is None
    assert summary[BASELINE]["acceptance_by_position"] == []
    assert summary["hf_generate"]["time_share"] is None
    assert summary["hf_generate"]["mean_accepted"] == pytest.approx(5 / 3)


def test_failed_questions_are_counted_and_left_out():
    failed = QuestionRow("c", "maths", "lookup", error="UserError: too long")
    lookup = summarise([*ROWS, failed], KINDS, True, True)["lookup"]
    assert (lookup["questions"], lookup["errors"]) == (2, 1)
    # A baseline that failed leaves its question out of the speedup only.
    rows = [ROWS[1], *ROWS[2:], QuestionRow("a", "maths", BASELINE, error="x")]
    lookup = summarise(rows, KINDS, True, True)["lookup"]
    assert (lookup["questions"], lookup["speedup"]) == (2, pytest.approx(2.0))
    assert lookup["lossless"] is None  # not all of its texts could be compared


def test_nothing_answered_gives_nulls():
    summary = summarise([QuestionRow("a", "m", "lookup", error="x")], {"lookup": "method"}, True, True)["lookup"]
    assert summary["mean_accepted"] is summary["speedup"] is summary["lossless"] is summary["time_share"] is None
    assert summary["questions"] == 0


def test_what_was_chosen_is_added_up_over_turns_and_questions():
    first = turn(choices=[Choice("pld", "first", None, 1), Choice("spire", "first", 1.5, 2)])
    second = turn(choices=[Choice("spire", "fastest", 2.0, 3), Choice(BASELINE, "trial", 1.0, 2)])
    rows = [row("auto", "a", first, second), row("auto", "b", turn())]
    assert [one.steps for one in rows[0].choices] == [1, 2, 3, 2]
    for ordered in (rows, rows[::-1]):
        ran = summarise(ordered, {"auto": "method"}, True, True)["auto"]["ran"]
        assert ran == {
            "spire": {"share": 5 / 8, "why": {"first": 2 / 5, "fastest": 3 / 5}, "speed": 9 / 5},
            BASELINE: {"share": 2 / 8, "why": {"trial": 1.0}, "speed": 1.0},
            "pld": {"share": 1 / 8, "why": {"first": 1.0}, "speed": None},
        }
    assert summarise([row("pld", "a", turn())], {"pld": "method"}, True, True)["pld"]["ran"] is None


def test_a_method_that_drafts_in_fewer_than_5_percent_of_its_steps_has_no_speedup():
    drafted = {"no": [3] + [0] * 20, "yes": [3] + [0] * 19, "hf_generate": [], "hf_prompt_lookup": [0] * 21}
    steps = {name: turn(drafted=drafted[name], accepted=[0] * len(drafted[name])) for name in drafted}
    rows = [*ROWS[:2], *(row(name, "a", one) for name, one in steps.items())]
    found = summarise(rows, dict.fromkeys([BASELINE, *drafted], "method"), True, True)
    for name in ("no", "hf_prompt_lookup"):
        assert (found[name]["speedup"], found[name]["speedup_ci95"]) == (None, None), name
        assert found[name]["no_speedup"] == found[name]["by_category"]["maths"]["no_speedup"] == "did not draft"
        assert found[name]["tokens_per_s_micro"] == pytest.approx(3)
    for name, speedup in {BASELINE: 1.0, "yes": 2.0, "hf_generate": 2.0}.items():
        assert (found[name]["speedup"], found[name]["no_speedup"]) == (pytest.approx(speedup), None)


def test_answers_are_grouped_by_the_longest_prompt():
    lengths = {"a": [256], "b": [10, 257], "c": [4096], "d": [4097]}
    rows = [replace(row("lookup", name, turn()), prompt_tokens=tokens) for name, tokens in lengths.items()]
    found = summarise(rows, {"lookup": "method"}, True, True)["lookup"]["by_context"]
    assert [(context, one["questions"]) for context, one in found.items()] == [
        (context, 1) for context in ("256", "1024", "4096", "longer")
    ]


def test_the_work_of_others_is_a_mean_over_the_seconds_of_answers():
    rows = [replace(row("lookup", name, turn()), other_work=share) for name, share in (("a", 0.5), ("b", 0.1))]
    rows[1] = replace(rows[1], seconds=3 * rows[0].seconds)
    unknown = row("lookup", "c", turn())  # of a run before it was measured
    assert summarise([*rows, unknown], KINDS, True, True)["lookup"]["other_work"] == pytest.approx(0.2)
    assert summarise([unknown], KINDS, True, True)["lookup"]["other_work"] is None
