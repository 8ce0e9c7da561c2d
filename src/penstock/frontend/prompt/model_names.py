"""Model names: which model a public name stands for, by aliases, weights and sessions, and which get a copy.

A session's model is that of the smallest ``-ln(u) / weight``, with u drawn from a hash of the session and the model: so
every process chooses alike without remembering anything, and a changed weight moves only sessions to or from its model.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.prompt.request_body import Endpoint

SCALE = 2.0**64


class ShadowOrder(NamedTuple):
    """The copies that a request is to have, once its client has been answered. ``body``: as the client sent it."""

    name: str
    models: tuple[str, ...]
    endpoint: Endpoint
    body: bytes
    streamed: bool


class ModelNames:
    """The names of a cluster beside those of its models."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.aliases: dict[str, str] = {}
        self.weights: dict[str, dict[str, float]] = {}
        """Model -> weight of every shared name; weights of 0 are left out."""
        self.shadows: dict[str, dict[str, float]] = {}
        """Model -> share, of every shared name."""
        self.use(settings)

    def use(self, settings: ClusterSettings) -> None:
        """Take the names of other settings."""
        self.aliases = {alias: model for model, entry in settings.models.items() for alias in entry.aliases}
        self.weights = {
            name: {model: weight for model, weight in shared.models.items() if weight} or {name: 1.0}
            for name, shared in settings.names.items()
        }
        self.shadows = {
            name: {model: share for model, share in shared.shadow.items() if share}
            for name, shared in settings.names.items()
        }

    def known(self) -> dict[str, str]:
        """Return every name that is no model's own, with the model that answers most of its requests."""
        return self.aliases | {name: self.main(name) for name in self.weights}

    def behind(self, name: str) -> tuple[str, ...]:
        """Return the models and adapters that may answer by a name."""
        weights = self.weights.get(name)
        return (self.aliases.get(name, name),) if weights is None else tuple(weights)

    def main(self, name: str) -> str:
        """Return the model that a name stands for; of a shared name, the one with the largest weight."""
        weights = self.weights.get(name)
        return self.aliases.get(name, name) if weights is None else max(weights, key=lambda model: weights[model])

    def model(self, name: str, by: str, ready: Callable[[str], int]) -> str:
        """Return the model for a request by a shared name.

        Args:
            by: its session; requests of the same one go to the same model.
            ready: returns how many workers of a model can take a request; a model without any is left out while
                another has some.
        """
        weights = self.weights[name]
        serving = [model for model in weights if ready(model)] or list(weights)
        return min(serving, key=lambda model: -math.log(_drawn(name, by, model)) / weights[model])

    def copied_to(self, name: str, by: str, answering: str) -> tuple[str, ...]:
        """Return the models that get a copy of a request; a session is copied as a whole or not at all."""
        shadows: Mapping[str, float] = self.shadows.get(name) or {}
        return tuple(
            model
            for model, share in shadows.items()
            if model != answering and _drawn(f"shadow of {name}", by, model) <= share
        )


def _drawn(name: str, by: str, model: str) -> float:
    """Return a number above 0 and up to 1 that is always the same for the same texts."""
    digest = hashlib.blake2b("\0".join((name, by, model)).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 1) / SCALE
