"""The reader of YAML files: plain values, and nothing that a few lines can blow up."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from spectrain.stores.folder import read_text

LARGEST_YAML_BYTES = 2**20


class _PlainYaml(yaml.SafeLoader):
    """YAML without aliases, of which a few lines can stand for gigabytes, and with 1e-3 as a number, as for Hydra."""

    def compose_node(self, parent: object, index: object) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name), which are not read")
        return super().compose_node(parent, index)


_PlainYaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789"
)


def read_yaml(file: Path) -> object:
    """Read a YAML file as plain values. Raises ValueError where it is none, large, nested deeply, or has aliases."""
    text = read_text(file, LARGEST_YAML_BYTES)
    try:
        return yaml.load(text, Loader=_PlainYaml)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
