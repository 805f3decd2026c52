ACTIVATIONS = {"silu": 1, "gelu_pytorch_tanh": 2}  # numbers that the kernels know them by
