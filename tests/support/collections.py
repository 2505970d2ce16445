"""Collections of optimizers that users bring, imported without the warnings that they give."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_optimizer as pytorch_optimizer
