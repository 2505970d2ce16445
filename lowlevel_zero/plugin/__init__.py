"""The plugin for ColossalAI's ``Booster``. No other part of the package imports ColossalAI.

It uses the optimizer's public methods: the boosted one is a ``LowLevelZeroOptimizer`` that ColossalAI knows, too.
"""

from .booster_plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
