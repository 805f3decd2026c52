"""JSON values as dataclasses: the type of each field is checked."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from spectrain.stores.typed import from_json


@dataclass(frozen=True)
class Size:
    width: int


@dataclass(frozen=True)
class Box:
    name: str
    sizes: tuple[Size, ...]
    weight: float | None = None


def test_dataclasses_in_fields_are_made_too():
    made = from_json(Box, {"name": "a", "sizes": [{"width": 2}], "weight": 3})
    assert made == Box("a", (Size(2),), 3.0)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([], "it holds no names with values"),
        ({"name": "a"}, "sizes: "),
        ({"name": "a", "sizes": [], "colour": "red"}, "colour is unknown"),
        ({"name": 5, "sizes": []}, "name: "),
        ({"name": "a", "sizes": [{"width": "2"}]}, "sizes.0.width: "),
        ({"name": "a", "sizes": [{"width": True}]}, "sizes.0.width: "),
        ({"name": "a", "sizes": [], "weight": "heavy"}, "weight: "),
    ],
)
def test_a_value_of_another_type_is_named(values, why):
    with pytest.raises(ValueError, match=why):
        from_json(Box, values)


def test_values_of_a_mapping_are_checked():
    assert from_json(dict[str, tuple[str, int]], {"a": ["b", 1]}) == {"a": ["b", 1]}
    with pytest.raises(ValueError, match=r"^a\.1: "):
        from_json(dict[str, tuple[str, int]], {"a": ["b", "1"]})
