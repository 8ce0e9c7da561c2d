"""Model catalog: the models that clients may name, what routing needs of each, and what decides a prompt's blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.adapters.engines.dialects.scale_out_routes import GENERATE, RENDER, has_route
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.prompt import context_overflow
from penstock.frontend.prompt.model_names import ModelNames, ModelPreset, template_text
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptMedia
from penstock.frontend.prompt.prompt_renderer import ENGINE, OFF
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer
from penstock.kernel.errors import ClientError
from penstock.kernel.hashing import TEXT_BLOCK_BYTES
from penstock.kernel.values import WorkerCard

RESOLVED_MAX = 1024
"""Most names of models, adapters included, whose resolution is remembered."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Which model a request is for, and what routing needs of it."""

    model: str
    adapter: str | None
    tokenizer: PromptTokenizer | None
    block_size: int
    max_model_len: int | None
    render: tuple[str, ...] = ()
    """Servers that make the tokens of its prompts."""
    generates: bool = False
    """Whether some worker takes those tokens as they are."""
    name: str | None = None
    """Name by which it was asked for, where that is an alias or shared between models."""
    preset: ModelPreset | None = None
    special: bool = False
    """Whether its requests change on their way, by their name or by the preset."""

    @property
    def served(self) -> str:
        """Its own name: that of the adapter, or of the model."""
        return self.model if self.adapter is None else self.adapter


class ModelCatalog:
    """The models of one frontend.

    Args:
        tokenizers: of every configured model; None where its text is hashed.
        renders: the setting ``render`` of models that have it.
        names: beside those of models.
        presets: of the models that put something into their requests.
        caching: whether the settings let tokenizers remember what they tokenised.
        may_use: whether a caller may ask for a name; None stands for nobody's request, which may ask for all.
    """

    def __init__(
        self,
        cluster: ClusterView,
        tokenizers: Mapping[str, PromptTokenizer | None],
        names: ModelNames,
        presets: Mapping[str, ModelPreset],
        *,
        renders: Mapping[str, str],
        caching: bool,
        may_use: Callable[[str | None, str], bool],
    ) -> None:
        self.tokenizers = tokenizers
        self.names = names
        self._presets = presets
        self._renders = renders
        self._cluster = cluster
        self._caching = caching
        self._may_use = may_use
        self._changes = 0
        """The workers' changes after which names were resolved."""
        self._resolved: dict[str, ResolvedModel] = {}

    def use(self, settings: ClusterSettings) -> None:
        """Take the names of other settings."""
        self.names.use(settings)
        self._resolved = {}

    def models(self) -> dict[str, WorkerCard | None]:
        """Return every model that clients may name: configured, served, and adapters; each with one worker's card."""
        models: dict[str, WorkerCard | None] = dict.fromkeys(self.tokenizers)
        loads = self._cluster.adapters
        for card in self._cluster.cards():
            for name in (card.model, *card.adapters):
                if models.get(name) is None and (loads is None or not loads.registry.dropped(name)):
                    models[name] = card
        return {**{name: models.get(model) for name, model in self.names.known().items()}, **models}

    def usable(self, caller: str | None) -> list[str]:
        """Return every model, adapter and name for which a caller may ask, in alphabetical order."""
        return sorted(name for name in self.models() if self._may_use(caller, name))

    def unknown(self, name: str, caller: str | None) -> ClientError:
        """Make the refusal of a name that nothing has."""
        known = ", ".join(self.usable(caller)) or "none yet"
        text = f"the model {quoted(name)} does not exist; known models: {known}"
        return rejected(text, "model", code="model_not_found", status=404)

    def resolve(self, name: str, caller: str | None = None) -> ResolvedModel:
        """Resolve the model name of a request; a name that models share becomes the one with the largest weight.

        Raises:
            ClientError: 404: it is unknown; the message lists those for which the caller may ask.
        """
        changes = self._cluster.changes()
        if changes != self._changes:
            # Workers come and go seldom: a model's name is resolved once for each set of them.
            self._changes, self._resolved = changes, {}
        resolved = self._resolved.get(name)
        if resolved is None:
            model = self._main(name)
            resolved = self._resolve(model, self._cluster.cards(), caller)
            if model != name or name in self.names.weights:
                resolved = replace(resolved, name=name, special=True)
            if len(self._resolved) < RESOLVED_MAX:
                self._resolved[name] = resolved
        return resolved

    def direct(self, model: str) -> ResolvedModel:
        """Resolve a model by its own name alone.

        Raises:
            ClientError: 404.
        """
        return self._resolve(model, self._cluster.cards())

    def route(self, resolved: ResolvedModel, by: str, caller: str | None = None) -> ResolvedModel:
        """Return the model for one request of a name, which models may share; ``by`` is its session.

        Raises:
            ClientError: 404: that model is none, as in `resolve`.
        """
        name = resolved.name
        if name is None or name not in self.names.weights:
            return resolved
        model = self.names.model(name, by, self.ready)
        if model == resolved.served:
            return resolved
        return replace(self._resolve(model, self._cluster.cards(), caller), name=name, special=True)

    def ready(self, name: str) -> int:
        """Return how many workers can take a request for a model, or for an adapter; 0 where there is none of it."""
        base = name if name in self.tokenizers else self._base_of(name, self._cluster.cards())
        return self._cluster.ready(name if base is None else base)

    def _main(self, name: str) -> str:
        """Return the model or adapter that a name stands for first; one that operators took out of service is none."""
        weights, loads = self.names.weights.get(name), self._cluster.adapters
        if weights is None or loads is None:
            return self.names.main(name)
        kept = [model for model in weights if not loads.registry.dropped(model)] or list(weights)
        return max(kept, key=lambda model: weights[model])

    def _resolve(self, name: str, every: Sequence[WorkerCard], caller: str | None = None) -> ResolvedModel:
        cards = [card for card in every if card.model == name]
        adapter: str | None = None
        model = name
        if not cards and name not in self.tokenizers:
            base = self._base_of(name, every)
            cards = [] if base is None else [card for card in every if card.model == base]
            if base is None:
                raise self.unknown(name, caller)
            adapter, model = name, base
        lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
        # A worker of unknown context length may take what the others can't.
        most = max(lengths) if lengths and len(lengths) == len(cards) else None
        tokenizer, block_size = self.tokenizers.get(model), self._cluster.block_size(model)
        servers = self._render_servers(self._renders.get(model), tokenizer is None, cards)
        preset = self._presets.get(model)
        return ResolvedModel(
            model,
            adapter,
            tokenizer,
            block_size,
            most,
            servers,
            generates=any(has_route(card, GENERATE) for card in cards),
            preset=preset,
            special=preset is not None,
        )

    def _render_servers(self, setting: str | None, unread: bool, cards: Sequence[WorkerCard]) -> tuple[str, ...]:
        """Return who makes the tokens of a model's prompts; ``unread``: its text can't be tokenised here."""
        able = tuple(card.url for card in cards if has_route(card, RENDER))
        if setting is None:
            return able if unread else ()
        if setting == ENGINE:
            return able or tuple(card.url for card in cards)  # one without the routes is named as failing
        return () if setting == OFF else (setting,)

    def _base_of(self, adapter: str, every: Sequence[WorkerCard]) -> str | None:
        """Return the model of an adapter; None where there is no such adapter."""
        loads = self._cluster.adapters
        known = None if loads is None else loads.registry.find(adapter)
        if known is not None:
            return known.model
        if loads is not None and loads.registry.dropped(adapter):
            return None
        return next((card.model for card in every if adapter in card.adapters), None)

    def hashing(self, resolved: ResolvedModel, salt: str | None, media: Sequence[str | None] = ()) -> BlockHashing:
        """Return what decides a prompt's blocks besides its tokens. ``media``: the ids of its images."""
        images = self._cluster.images(resolved.model) if media else None
        return BlockHashing(
            block_size=resolved.block_size,
            text_block_bytes=TEXT_BLOCK_BYTES,
            adapter=resolved.adapter,
            salt=salt,
            media=tuple([PromptMedia(id, None if id is None or images is None else images.find(id)) for id in media])
            if media
            else (),
            placeholders=frozenset() if images is None else frozenset(images.placeholders),
            usual=0 if images is None else images.usual,
        )

    def notes(self) -> list[str]:
        """Return notes for the health route: of models whose prompts are prepared worse than they could be."""
        notes = [
            f"{model} has no local tokenizer: it is routed by hashed text blocks, which match caches less well"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is None and not self._resolve(model, self._cluster.cards()).render
        ]
        notes += [
            f"the tokenizer cache of {model} is off: {tokenizer.why_no_cache}"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is not None and not tokenizer.caches and self._caching
        ]
        return notes


def load_tokenizers(settings: ClusterSettings) -> dict[str, PromptTokenizer | None]:
    """Load every configured model's tokenizer.

    Raises:
        ConfigError: a named tokenizer or chat template can't be loaded.
    """
    return {
        name: None
        if model.tokenizer is None
        else load_tokenizer(
            model.tokenizer,
            cache_bytes=settings.frontend.tokenize.cache_bytes,
            template=template_text(name, model),
        )
        for name, model in settings.models.items()
    }


def check_prompt(resolved: ResolvedModel, isl: int, prompt_max: int | None, param: str) -> None:
    """Refuse a prompt that is too long, with the numbers.

    Args:
        isl: prompt tokens, counted (an estimate refuses nothing).
        param: the field that holds the prompt.

    Raises:
        ClientError: 400.
    """
    if prompt_max is not None and isl > prompt_max:
        raise rejected(context_overflow.above_limit(isl, prompt_max, param), param, code=context_overflow.CODE)
    if resolved.max_model_len is not None and isl >= resolved.max_model_len:
        raise rejected(context_overflow.too_long(isl, resolved.max_model_len, param), param, code=context_overflow.CODE)
