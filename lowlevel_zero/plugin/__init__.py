"""The Booster plugin: this ZeRO in ColossalAI training. The only package that imports ColossalAI."""

from .booster_plugin import LowLevelZeroPlugin

__all__ = ["LowLevelZeroPlugin"]
