"""`python -m spectrain.tune`: what it refuses. What it finds is tested beside what it searches."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["method=pld"], "method=pld has nothing to tune; give method=sssd or method=specdecpp"),
        ([], "method=null has nothing to tune"),
        (["budget=true"], "budget"),
    ],
)
def test_wrong_options_are_one_sentence(run, arguments, says):
    code, _, err = run("tune", *arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
