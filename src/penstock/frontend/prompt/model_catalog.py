"""Model catalog: the models that clients may name, what routing needs of each, and what decides a prompt's blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.cluster_view import ClusterView
from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.prompt import context_overflow
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptMedia
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer
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


class ModelCatalog:
    """The models of one frontend.

    Args:
        tokenizers: of every configured model; None where its text is hashed.
        caching: whether the settings let tokenizers remember what they tokenised.
    """

    def __init__(
        self, cluster: ClusterView, tokenizers: Mapping[str, PromptTokenizer | None], *, caching: bool
    ) -> None:
        self.tokenizers = tokenizers
        self._cluster = cluster
        self._caching = caching
        self._changes = 0
        """The workers' changes after which names were resolved."""
        self._resolved: dict[str, ResolvedModel] = {}

    def models(self) -> dict[str, WorkerCard | None]:
        """Return every model that clients may name: configured, served, and adapters; each with one worker's card."""
        models: dict[str, WorkerCard | None] = dict.fromkeys(self.tokenizers)
        for card in self._cluster.cards():
            for name in (card.model, *card.adapters):
                if models.get(name) is None:
                    models[name] = card
        return models

    def resolve(self, name: str) -> ResolvedModel:
        """Resolve the model name of a request.

        Raises:
            ClientError: 404: it is unknown; the message lists the known ones.
        """
        changes = self._cluster.changes()
        if changes != self._changes:
            # Workers come and go seldom: a model's name is resolved once for each set of them.
            self._changes, self._resolved = changes, {}
        resolved = self._resolved.get(name)
        if resolved is None:
            resolved = self._resolve(name, self._cluster.cards())
            if len(self._resolved) < RESOLVED_MAX:
                self._resolved[name] = resolved
        return resolved

    def _resolve(self, name: str, every: Sequence[WorkerCard]) -> ResolvedModel:
        cards = [card for card in every if card.model == name]
        adapter: str | None = None
        model = name
        if not cards and name not in self.tokenizers:
            cards = [card for card in every if name in card.adapters]
            if not cards:
                known = ", ".join(sorted(self.models())) or "none yet"
                raise rejected(
                    f"the model {quoted(name)} does not exist; known models: {known}",
                    "model",
                    code="model_not_found",
                    status=404,
                )
            adapter, model = name, cards[0].model
        lengths = [card.max_model_len for card in cards if card.max_model_len is not None]
        # A worker of unknown context length may take what the others can't.
        most = max(lengths) if lengths and len(lengths) == len(cards) else None
        return ResolvedModel(model, adapter, self.tokenizers.get(model), self._cluster.block_size(model), most)

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
            placeholder=None if images is None else images.placeholder,
            usual=0 if images is None else images.usual,
        )

    def notes(self) -> list[str]:
        """Return notes for the health route of a healthy frontend."""
        notes = [finding.text for finding in self._cluster.status().findings]
        notes += [
            f"{model} has no local tokenizer: it is routed by hashed text blocks, which match caches less well"
            for model, tokenizer in self.tokenizers.items()
            if tokenizer is None
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
        ConfigError: a named tokenizer can't be loaded.
    """
    return {
        name: None
        if model.tokenizer is None
        else load_tokenizer(model.tokenizer, cache_bytes=settings.frontend.tokenize.cache_bytes)
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
