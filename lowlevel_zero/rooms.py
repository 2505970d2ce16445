"""What rooms do for an optimizer: the one place where the core names them.

They import the core, whose files import this one whole (``from . import rooms``) and look into it when it is called.
"""

from .gradients.edits import check_edits as check_edits
from .gradients.edits import refuse as refuse
from .gradients.of_optimizer import OptimizerGradients as OptimizerGradients
from .state.values import whole_gradients as whole_gradients
from .state.whole import load_state_dict as load_state_dict
from .state.whole import state_dict as state_dict
from .state.whole import state_dict_shard as state_dict_shard
