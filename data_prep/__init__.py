"""Let a target model write responses, activations, labels and datastores."""
