"""Other tools' words for options, of conf/words.yaml, for those who type them."""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import OmegaConf

from spectrain.config import conf_dir
from spectrain.errors import closest

# Words that are taken for the first of these options that a command has. Other words are only suggested.
ALIASES = {"lr": ("optimizer.lr",), "learning_rate": ("optimizer.lr",), "num_epochs": ("epochs",)}
ALIASES |= {"batch_size": ("data.batch_size",), "dataset": ("corpus", "prompts"), "max_length": ("data.row_tokens",)}


def did_you_mean(wrong: str, options: Collection[str]) -> str:
    """Return "; did you mean ...?" with the option of a command that was meant by a wrong one, or "" if none is."""
    known = OmegaConf.to_container(OmegaConf.load(conf_dir() / "words.yaml"))
    words = {word: option for option in reversed(known) if option in options for word in known[option].split()}
    near = wrong if wrong in words else closest(wrong, [*options, *words])
    return f"; did you mean {words.get(near, near)}?" if near else ""
