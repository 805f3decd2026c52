"""Lets transformers decode with the export that this folder stands in.

model.generate(**inputs, custom_generate="<export>/decode", trust_remote_code=True)
"""

import sys

try:
    from spectrain.exports.transformers_generate import generate as decode
except ImportError as error:
    raise ImportError(
        "this export is decoded with by spectrain, which cannot be imported here; install it in this environment by "
        "pip install <folder of its repository>"
    ) from error


def generate(model, **arguments):
    # transformers runs a copy of this file, so only what it was told itself says which export this is.
    return decode(model, sys._getframe(1).f_locals.get("custom_generate"), **arguments)
