"""For tests of users and plugins: a world of a router, effects to compare, contract suites.

`penstock.testing.store_contract`, `plane_contract`, `connector_contract`, `router_plugin_contract` and `route_contract`
are suites for pytest with pytest-asyncio in mode auto; each says which fixture it needs. `installed_extensions` has
extensions without pip.
"""

from penstock.testing.effects import like, none, only
from penstock.testing.router_world import RouterWorld, arrived, card, prompt

__all__ = ["RouterWorld", "arrived", "card", "like", "none", "only", "prompt"]
