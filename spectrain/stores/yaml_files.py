"""The reader of YAML files, as plain values."""

from __future__ import annotations

import re
from pathlib import Path

import yaml


class _PlainYaml(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as it is for Hydra."""


_PlainYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789"
)


def read_yaml(file: Path) -> object:
    """Read a YAML file as plain values. Raises ValueError where it is none."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=_PlainYaml)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
