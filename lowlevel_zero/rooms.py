"""What rooms do for an optimizer: the one place where the core names them.

They import the core, whose files import this one whole (``from . import rooms``) and look into it when it is called.
"""

from .gradients.edits import check_edits as check_edits
from .gradients.edits import refuse as refuse
from .gradients.of_optimizer import OptimizerGradients as OptimizerGradients
