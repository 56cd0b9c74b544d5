"""Predicates for JSON documents: what they take, and that nothing which JSON has makes them fail."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ewc_finetune.storage.json_fields import (
    has,
    is_count,
    is_number,
    is_text,
    list_of,
    nullable,
    object_of,
    optional,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["name", "sizes"]), inner),
)


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (is_number, [0, -1.5, 2**63 - 1], [True, 2**63, math.nan, -math.inf, "1", None]),
        (is_count, [0, 7], [-1, 1.0, True, 2**63, None]),
        (nullable(is_text), [None, ""], [0, []]),
        (list_of(is_count), [[], [1, 2]], [None, {}, [-1], "12"]),
        (object_of(is_text), [{}, {"a": "b"}], [[], None, {"a": 1}]),
        (has(a=is_text), [{"a": ""}, {"a": "", "b": 1}], [{}, {"a": None}, [], "a"]),
        (has(a=nullable(is_text)), [{"a": None}], [{}]),
        (has(a=optional(is_text)), [{}, {"a": ""}], [{"a": None}]),
        (has(a=optional(nullable(is_text))), [{}, {"a": None}], [{"a": 1}]),
    ],
)
def test_what_is_right_and_what_is_wrong(check, right, wrong):
    assert all(map(check, right))
    assert not any(map(check, wrong))


@given(VALUES)
def test_any_document_is_either(value):
    check = has(name=is_text, sizes=optional(list_of(nullable(is_count))), parts=optional(object_of(is_number)))
    if check(value):
        assert isinstance(value["name"], str)
