"""Let a target model write responses, activations, labels and datastores."""

import spectrain  # noqa: F401 (it answers signals while a command is imported)
