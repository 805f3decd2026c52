"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, whatever they serve.

So nothing but a name is registered: the class is imported where a drafter's folder asks for it.
"""

from __future__ import annotations

import logging
import re

log = logging.getLogger("vllm.spectrain")  # below vLLM's own, so that it is shown

ARCHITECTURE = "SpireLlamaEagle3"
OLDEST = (0, 32)  # the oldest vLLM that was tried; earlier ones lay out their caches otherwise


def register() -> None:
    import vllm

    if (why := why_not(vllm.__version__)) is not None:
        log.warning("SPIRe drafters are not registered: %s", why)
        return
    vllm.ModelRegistry.register_model(ARCHITECTURE, f"spectrain.exports.vllm_spire:{ARCHITECTURE}")


def why_not(version: str) -> str | None:
    """Return why a vLLM of this version cannot run SPIRe drafters; None: it may."""
    numbers = re.match(r"(\d+)\.(\d+)", version)  # a build of one's own may have any version
    if numbers and (0, 1) < tuple(map(int, numbers.groups())) < OLDEST:
        return f"they need vLLM {'.'.join(map(str, OLDEST))} or newer, and this is {version}; install a newer one"
    return None
