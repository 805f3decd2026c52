"""Trains draft models for speculative decoding, and decodes with them in one lossless loop.

from spectrain import load_method      # opens any exported folder, for `spectrain.decoding.generate`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spectrain.methods.loading import load_method as load_method

__all__ = ["load_method"]


def __getattr__(name: str) -> object:
    """Imported when it is asked for: the commands import this package too, and most need no drafter."""
    if name == "load_method":
        from spectrain.methods.loading import load_method

        return load_method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
