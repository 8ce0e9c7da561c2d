"""`TrafficRequest`: one request of a trace or a workload, before it is sent."""

import msgspec

from penstock.kernel.media.media_tokens import image_tokens

TRACE_BLOCK = 512
"""Tokens per hash id in the Mooncake traces."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a chat: ``role`` as in the OpenAI dialect, ``content`` plain text."""

    role: str
    content: str


class TrafficMedia(msgspec.Struct, frozen=True):
    """An image of a prompt: ``id`` of its content; its pixels; the tokens that stand for it begin at ``start``."""

    id: str
    width: int
    height: int
    start: int

    @property
    def tokens(self) -> int:
        """Tokens that stand for it."""
        return image_tokens(self.width, self.height)


class TrafficRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it arrives, how long it is, and which prefix it shares with others.

    The prompt is given in one of three ways. ``hash_ids`` name blocks of ``block_size`` tokens, the last one cut off
    at ``isl``: two prompts share tokens exactly as far as their ids agree from the start. Tokens that the ids do not
    cover, all of them where a trace knows only lengths, are not shared (`numbered` names them). ``token_ids``
    are the prompt itself. ``messages`` are text, and then ``isl`` is an estimate that the tokenizer has yet to correct.

    Units: ``at`` seconds from the start of the trace; ``isl``, ``osl`` tokens; ``think`` seconds between the end of
    the session's turn before and this one, where the trace says so.
    """

    at: float
    isl: int
    osl: int
    hash_ids: list[int] = []
    block_size: int = TRACE_BLOCK
    token_ids: list[int] | None = None
    messages: list[ChatMessage] | None = None
    session: str | None = None
    program: str | None = None
    """The run of an agent that the session belongs to, with all its sub-agents."""
    turn: int = 0
    think: float | None = None
    media: list[TrafficMedia] = []
    """Images in it, whose tokens count in ``isl``."""
    kind: str | None = None
    """Service class or name of the workload part, as it is reported."""
    tenant: str | None = None
    """Whose request it is, where tenants share the fleet."""
    adapter: str | None = None
    """LoRA adapter that it names in place of the model."""
