"""Presets: other defaults of the router's settings for a kind of traffic. What a config sets itself wins over them."""

from collections.abc import Mapping

AGENTIC = {
    "router.affinity.mode": "soft",
    "router.affinity.ttl": "1h",
    "router.cost.decode_scale": "0.3",
}
"""Searched in simulation, and held to other traffic: docs/bench/agents.md. The hour is longer than tests and reviews
between two turns take; ten minutes measured the same."""
PRESETS: Mapping[str, Mapping[str, str]] = {"general": {}, "agentic": AGENTIC}
"""Preset -> dotted name -> text, as a config has it."""
