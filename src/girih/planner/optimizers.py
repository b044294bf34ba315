"""Facts of optimizers by their names, for plans that give several processes parts of a parameter."""

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
"""Optimizers of ``torch.optim`` that move a part of a parameter as they would move it within the whole."""
