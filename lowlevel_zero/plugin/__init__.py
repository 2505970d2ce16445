"""The Booster plugin: this ZeRO in ColossalAI training. The only room that imports ColossalAI.

Hangs on the optimizer's public methods: the boosted one is a ``LowLevelZeroOptimizer`` that ColossalAI knows, too.
"""

from .booster_plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
