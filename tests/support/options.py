"""Options by name, whatever group they belong to, so that tests can merge, draw and leave out single ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowlevel_zero.options import GROUPS, abouts


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of the optimizer: an option that is a field of a group alone comes in that group."""
    keywords = dict(options)
    for name, group in GROUPS.items():
        known = abouts(group)
        own = {each: keywords.pop(each) for each in options if each in known and known[each].keyword != each}
        if own:
            keywords[name] = replace(keywords.get(name) or group(), **own)
    return keywords
