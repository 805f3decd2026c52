"""What requests may say: each field with values of all types is taken as it is or refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.decoding import Sampling
from spectrain.serving.protocol import (
    NEUTRAL,
    WITHOUT_EFFECT,
    ApiError,
    ChatRequest,
    CompletionRequest,
    parsed,
)

CHAT = {"messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"prompt": "a"}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS = {"chat": (ChatRequest, CHAT), "completion": (CompletionRequest, COMPLETION)}
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL})


@pytest.mark.parametrize("kind", KINDS)
@given(name=st.sampled_from(FIELDS) | st.text(max_size=8), value=VALUES)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_value_is_taken_as_it_is_or_refused_by_name(kind, name, value):
    model, base = KINDS[kind]
    try:
        fields = parsed(model, json.dumps(base | {name: value}).encode())
    except ApiError as error:
        found, beside = error.body["error"], ("top_logprobs", "stream_options")  # fields that need another one
        is_named = found["param"] is None or found["param"].startswith((name, *beside))  # None: NaN is no JSON
        assert error.status == 400 and is_named, found  # noqa: PT017, PT018
        return
    if value is None or name in NEUTRAL or name in WITHOUT_EFFECT:
        return
    taken = getattr(fields, name)
    if isinstance(value, bool | int | float | str):
        assert taken == value
        assert isinstance(value, float) or isinstance(taken, bool) == isinstance(value, bool)
    assert isinstance(fields.sampling(Sampling()), Sampling)  # whatever it is, the loop knows it


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_that_we_do_not_have_is_refused_unless_it_changes_nothing(name):
    for value in NEUTRAL[name]:
        assert name not in parsed(ChatRequest, json.dumps(CHAT | {name: value}).encode()).model_fields_set
    with pytest.raises(ApiError, match=f"^{name} is not supported; leave it out$"):
        parsed(ChatRequest, json.dumps(CHAT | {name: ["something"]}).encode())


def test_a_name_that_is_too_long_is_cut():
    with pytest.raises(ApiError) as caught:
        parsed(ChatRequest, json.dumps(CHAT | {"x" * 100_000: 1}).encode())
    assert len(str(caught.value)) < 200
    with pytest.raises(ApiError) as caught:
        parsed(ChatRequest, json.dumps({"messages": [CHAT["messages"][0] | {"y" * 100_000: 1}]}).encode())
    assert len(str(caught.value)) < 200


def test_what_a_request_does_not_say_is_the_servers_own():
    default = Sampling(0.5, 7, 0.9, 0.1)
    assert parsed(ChatRequest, json.dumps(CHAT).encode()).sampling(default) == default
    given = parsed(ChatRequest, json.dumps(CHAT | {"temperature": 2, "top_k": -1}).encode())
    assert given.sampling(default) == Sampling(2.0, 0, 0.9, 0.1)
    assert parsed(ChatRequest, json.dumps(CHAT | {"temperature": 1e-9}).encode()).sampling(default).greedy
