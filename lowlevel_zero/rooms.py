"""What rooms do for an optimizer: the one place where the core names them.

They import the core, whose files import this one whole (``from . import rooms``) and look into it when it is called.
"""

from .diagnostics.bad_numbers import BadNumbers as BadNumbers
from .diagnostics.debug_checks import checked as checked
from .diagnostics.guards import Guard as Guard
from .diagnostics.settings import Settings as Settings
from .diagnostics.settings import described as described
from .diagnostics.stall_report import seconds_of as seconds_of
from .diagnostics.stall_report import watch as watch
from .diagnostics.untrained import Untrained as Untrained
from .diagnostics.verification import verify as verify
from .gradients.edits import check_edits as check_edits
from .gradients.edits import refuse as refuse
from .gradients.of_optimizer import OptimizerGradients as OptimizerGradients
from .optim.elementwise import check_steps_slices as check_steps_slices
from .optim.modes import switch as switch
from .optim.quantised import slice_multiple as slice_multiple
from .optim.whole_steps import whole_step as whole_step
from .planning.of_optimizer import layout as layout
from .planning.of_optimizer import memory_held as memory_held
from .state.values import whole_gradients as whole_gradients
from .state.whole import load_state_dict as load_state_dict
from .state.whole import state_dict as state_dict
from .state.whole import state_dict_shard as state_dict_shard
