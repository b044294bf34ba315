"""A process that runs parts which came to it pickled."""

import pickle


def serve(pipe):
    """Answers (part, inputs) with what :func:`run` finds, until None comes."""
    modules = pickle.loads(pipe.recv_bytes())
    while (asked := pipe.recv()) is not None:
        name, inputs = asked
        pipe.send(run(modules[name], inputs))


def run(module, inputs):
    """Outputs of a part, then the gradients of their sum: of inputs and of parameters."""
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    outputs = module(*leaves)
    module.zero_grad()
    sum(each.sum() for each in outputs if each.requires_grad).backward()
    gradients = [leaf.grad for leaf in (*leaves, *module.parameters())]
    return [*(each.detach() for each in outputs), *gradients]
