"""Command ``penstock chat``: one answer for a text argument, a conversation without one."""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import click

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused, api_key_option, url_option
from penstock.cli.shared.cluster_names import models
from penstock.cli.shared.output import json_option, print_json, seconds_text
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import JsonObject
from penstock.runtime.supervision.terminal import at_url, this_command

EPILOG = """\b
Examples:
  penstock chat                           a conversation; /reset starts anew, Ctrl-D ends it
  penstock chat "Why is the sky blue?"
  penstock chat --max-tokens 16 --json Hello
  echo "Summarise: ..." | penstock chat -
"""

TURNS_MAX = 1000
HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends, Ctrl-C stops an answer."


@dataclass(slots=True)
class ChatAnswer:
    """The answer of one turn; seconds on this machine's clock."""

    text: str = ""
    finish: str | None = None
    usage: JsonObject = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    ttft: float | None = None
    took: float = 0.0


@click.command("chat", epilog=EPILOG, short_help="Talk to a model of the cluster.")
@click.argument("text", nargs=-1)
@click.option("--model", shell_complete=models, help="Model to talk to; unset takes the first that the cluster has.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature; unset leaves it to the engine.")
@url_option
@api_key_option
@json_option
def command(
    text: tuple[str, ...],
    model: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    url: str,
    api_key: str | None,
    as_json: bool,
) -> int:
    """Talk to a model. With TEXT it prints one answer (- reads it from standard input), else it is a conversation."""
    client = AdminClient(url, api_key, timeout=600.0)
    body: JsonObject = {"model": model or first_model(client), "max_tokens": max_tokens}
    if temperature is not None:
        body["temperature"] = temperature
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system is not None else []
    if text:
        prompt = sys.stdin.read() if text == ("-",) else " ".join(text)
        answer = ask(client, body, [*messages, {"role": "user", "content": prompt}], show=not as_json)
        if as_json:
            print_json(_as_data(body["model"], answer))
        else:
            click.echo("\n" + click.style(_footer(answer, client.url), dim=True), err=True)
        return 0
    if as_json:
        raise click.UsageError("--json prints one answer; give the text as an argument")
    return _converse(client, body, messages)


def first_model(client: AdminClient) -> str:
    """Ask the cluster which models it has."""
    names = [str(entry["id"]) for entry in client.get("/v1/models", dict).get("data", [])]
    if not names:
        raise PenstockError(f"{client.url} has no model", hint="'penstock status' shows what it has")
    return names[0]


def ask(client: AdminClient, body: JsonObject, messages: list[dict[str, str]], *, show: bool) -> ChatAnswer:
    """Send one turn and collect its stream; with ``show`` each piece is printed as it comes."""
    started = time.monotonic()
    request = {**body, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    answer = ChatAnswer()
    events = client.stream("/v1/chat/completions", request)
    answer.headers = {name: str(value) for name, value in next(events).items()}
    for event in events:
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or []:
            piece = (choice.get("delta") or {}).get("content") or ""
            answer.finish = choice.get("finish_reason") or answer.finish
            if piece and answer.ttft is None:
                answer.ttft = time.monotonic() - started
            answer.text += piece
            if show:
                click.echo(piece, nl=False)
    answer.took = time.monotonic() - started
    return answer


def _converse(client: AdminClient, body: JsonObject, start: list[dict[str, str]]) -> int:
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives the prompt its line editing

        click.echo(f"{body['model']} at {client.url}. {HELP}")
    messages = list(start)
    for _ in range(TURNS_MAX):
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            break
        if line in ("/quit", "/exit"):
            break
        if line == "/reset":
            messages = list(start)
            click.echo("Forgotten.")
            continue
        if line.startswith("/"):
            click.echo(HELP)
            continue
        if not line:
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            answer = ask(client, body, turn, show=True)
        except KeyboardInterrupt:
            click.echo("\n(stopped)")
            continue
        except (ClusterUnreachable, RequestRefused) as error:
            # A failed turn does not end a conversation; it can be sent again.
            click.echo(f"penstock: {error}", err=True)
            continue
        click.echo("\n" + click.style(_footer(answer, client.url), dim=True))
        messages = [*turn, {"role": "assistant", "content": answer.text}]
    return 0


def _footer(answer: ChatAnswer, url: str) -> str:
    """Return where the answer came from and how fast it was."""
    usage, headers = answer.usage, answer.headers
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    parts = []
    if headers.get("x-penstock-worker"):
        parts.append(headers["x-penstock-worker"])
    if usage:
        of_cache = "" if cached is None else f" ({cached} cached)"
        parts.append(f"{usage.get('prompt_tokens')} prompt tokens{of_cache}, {usage.get('completion_tokens')} new")
    parts.append(f"first after {seconds_text(answer.ttft)}, all after {seconds_text(answer.took)}")
    if headers.get("x-penstock-request-id"):
        parts.append(f"{this_command()} explain {headers['x-penstock-request-id']}{at_url(url)}")
    return "[" + "; ".join(parts) + "]"


def _as_data(model: str, answer: ChatAnswer) -> dict[str, Any]:
    headers = answer.headers
    return {
        "model": model,
        "text": answer.text,
        "finish_reason": answer.finish,
        "usage": answer.usage,
        "request_id": headers.get("x-penstock-request-id"),
        "worker": headers.get("x-penstock-worker"),
        "wall_ttft_s": answer.ttft,
        "wall_took_s": answer.took,
    }
