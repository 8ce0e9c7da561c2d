"""Media of a chat: has URLs fetched, checks what parts carry, and names each by its content."""

import asyncio
from collections.abc import Iterator

from penstock.frontend.media.media_content import (
    ITEMS_MAX,
    MediaContent,
    MediaPart,
    is_data_url,
    part_of,
    read_inline,
    too_large,
)
from penstock.frontend.media.media_fetcher import MediaFetcher
from penstock.frontend.prompt.prompt_hashing import PARSE_INLINE_MAX, PromptHasher
from penstock.frontend.prompt.request_body import Parsed, is_media, media_id, with_fields, with_media
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject


async def settle_media(parsed: Parsed, fetcher: MediaFetcher, prompts: PromptHasher, *, fetch: bool = True) -> None:
    """Have a chat's media named by their content; those of URLs take their URL's place in the request.

    Args:
        fetch: False leaves URLs as they are, and what is there unknown.
    Raises:
        ClientError: 400 or 413: a part holds no usable media, or its URL is not to be fetched; it names the part.
        OverloadedError: too many fetches run, or too many prompts wait for a thread.
    """
    places = list(_media_places(parsed))
    if len(places) > ITEMS_MAX:
        raise ClientError(f"the chat has {len(places)} media; at most {ITEMS_MAX} are taken", param="messages")
    parts = [part_of(part, param) for param, part in places]
    most = fetcher.settings.bytes_max
    if len(parsed.raw) <= PARSE_INLINE_MAX:
        contents = _inline(parts, most)
    else:
        contents = await prompts.in_thread(_inline, parts, most)
    wanted = [place for place, part in enumerate(parts) if fetch and part is not None and contents[place] is None]
    urls: dict[int, str] = {}
    if wanted:
        fetches = [asyncio.ensure_future(_fetched(fetcher, parts[place])) for place in wanted]
        try:
            found = await asyncio.gather(*fetches)
        finally:
            for each in fetches:
                each.cancel()
        for place, media in zip(wanted, found, strict=True):
            contents[place], urls[place] = media
    size, frames = 0, 0
    for part, content in zip(parts, contents, strict=True):
        if part is not None and content is not None:
            size, frames = size + content.size, frames + content.frames
            if size > most:
                raise too_large(part.param, f"with those before it {size}", most)
    if frames > ITEMS_MAX:
        raise ClientError(f"the chat has {frames} pictures; at most {ITEMS_MAX} are taken", param="messages")
    parsed.media = tuple(
        media_id(part) if content is None else content.id for (_, part), content in zip(places, contents, strict=True)
    )
    if urls:
        messages = _with_urls(parsed, urls)
        parsed.raw = await prompts.in_thread(with_fields, parsed, {"messages": messages})
        parsed.fields = {**parsed.fields, "messages": messages}


def _media_places(parsed: Parsed) -> Iterator[tuple[str, JsonObject]]:
    """Yield a chat's media parts, each with the name of its place."""
    for number, message in enumerate(parsed.fields["messages"]):
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                if is_media(part):
                    yield f"messages[{number}].content[{place}]", part


def _inline(parts: list[MediaPart | None], bytes_max: int) -> list[MediaContent | None]:
    return [
        read_inline(part, bytes_max) if part is not None and (part.url is None or is_data_url(part.url)) else None
        for part in parts
    ]


async def _fetched(fetcher: MediaFetcher, part: MediaPart | None) -> tuple[MediaContent, str]:
    assert part is not None and part.url is not None
    media = await fetcher.fetch(part.url, part.modality, part.param)
    return media.content, media.data_url


def _with_urls(parsed: Parsed, urls: dict[int, str]) -> list[JsonObject]:
    """Return a chat's messages with data URLs in the place of those that were fetched."""

    def fetched(number: int, part: JsonObject) -> JsonObject:
        url, kind = urls.get(number), str(part.get("type"))
        if url is None:
            return part
        field = kind if kind in part else "image_url"
        inner = part[field]
        return {**part, field: {**inner, "url": url} if isinstance(inner, dict) else url}

    return with_media(parsed, fetched)
