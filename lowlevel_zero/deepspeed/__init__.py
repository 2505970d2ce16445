"""For who comes from DeepSpeed: its JSON as keywords, and its accessors to one parameter's values.

Hangs on the optimizer's public methods and its records.
"""

from ..accessors import (
    full_fp32_params,
    full_grads,
    full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from .config import options_from_deepspeed

__all__ = [
    "full_fp32_params",
    "full_grads",
    "full_optimizer_states",
    "options_from_deepspeed",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]
