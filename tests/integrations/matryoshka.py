"""What sentence-transformers' `MatryoshkaLoss` does with a cached loss: it replaces `calculate_loss`."""


def shortened(original, sizes):
    """A function that calls ``original`` with the first numbers of each embedding, and returns the mean over sizes.

    With ``with_backward``, ``original`` runs backward itself, so this function continues it.
    """

    def calculate_loss(reps, *more, with_backward=False):
        total = 0.0
        for size in sizes:
            cut = [[part[:, :size] for part in column] for column in reps]
            leaves = [[part.detach().requires_grad_(with_backward) for part in column] for column in cut]
            total = total + original(leaves, *more, with_backward=with_backward) / len(sizes)
            for parts, column in zip(cut, leaves, strict=True):
                for part, leaf in zip(parts, column, strict=True):
                    if with_backward:
                        part.backward(leaf.grad / len(sizes))
        return total

    return calculate_loss
