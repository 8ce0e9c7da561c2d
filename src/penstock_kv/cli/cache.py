"""Command ``penstock cache``: looks into the KV tiers of engines, pins and drops blocks, checks what is stored."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused
from penstock.cli.shared.cluster_options import cluster_options
from penstock.cli.shared.option_values import SECONDS, Amount, address_of
from penstock.cli.shared.output import json_option, seconds_text, show, table
from penstock.kernel.plurals import counted

if TYPE_CHECKING:
    from penstock_kv.tiers.tier_admin_client import TierAdminClient
    from penstock_kv.tiers.tier_admin_protocol import CacheStat

EPILOG = """\b
Examples:
  penstock cache stat
  penstock cache ls --tier disk --limit 20
  penstock cache pin 0201000096c3 --for 1h
  penstock cache pin --prompt system.txt --tokenizer ./my-model --for 1h
  penstock cache clear --tier host --worker main-0
  penstock cache verify --rate 50MB/s
  penstock cache verify --no-bytes --index        only what routers believe
  penstock cache serve --socket /run/kv.sock --host 8GiB --disk 100GiB --disk-dir /mnt/kv

An engine whose pool has cache.host is started with a tier process, and these commands speak to that. Where there are
several, --worker says which one.
"""
BYTES = Amount("bytes")
RATE = Amount("bytes/s")


@click.group("cache", epilog=EPILOG, short_help="Look into KV tiers, pin, drop and check blocks.")
def command() -> None:
    """Look after the KV tiers below engines: host memory, disks, object store."""


def _target(function: Any) -> Any:
    for option in (
        click.option("--socket", "path", type=click.Path(path_type=Path), help="Socket of the tier process."),
        click.option("--worker", help="Engine whose tiers are meant, where there are several."),
    ):
        function = option(function)
    return function


_TIER = click.option("--tier", type=click.Choice(["host", "disk", "object"]), help="Only this tier.")


@command.command("stat", epilog=EPILOG)
@_target
@json_option
def stat(path: Path | None, worker: str | None, as_json: bool) -> int:
    """Show how full the tiers are, hits, bytes, failures and leaks."""
    from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat

    answer = _client(path, worker).ask(AskStat(), CacheStat)
    show(as_json, answer, _stat_text(answer))
    return 0


@command.command("ls", epilog=EPILOG)
@_target
@_TIER
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Most blocks shown.")
@json_option
def ls(path: Path | None, worker: str | None, tier: str | None, limit: int, as_json: bool) -> int:
    """List blocks, the newest first: key, tiers, tokens, age, pin."""
    from penstock_kv.tiers.tier_admin_protocol import BlockList, ListBlocks

    answer = _client(path, worker).ask(ListBlocks(tier=tier or "", limit=limit), BlockList)
    rows = [
        [
            block.key,
            "+".join(block.tiers),
            block.tokens,
            seconds_text(block.age),
            seconds_text(block.pinned) if block.pinned else "",
        ]
        for block in answer.blocks
    ]
    text = table(["key", "tiers", "tokens", "age", "pinned for"], rows) if rows else "There is no block."
    show(as_json, answer, f"{text}\n{answer.total:,} in all" if rows else text)
    return 0


@command.command("pin", epilog=EPILOG)
@_target
@click.argument("keys", nargs=-1)
@click.option("--prompt", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="File with a prompt.")
@click.option("--tokenizer", help="Folder or tokenizer.json of the model, for --prompt.")
@click.option("--hash-seed", default="0", show_default=True, help="The engine's PYTHONHASHSEED, for --prompt.")
@click.option("--tenant", default="", help="Tenant whose blocks they are.")
@click.option("--for", "seconds", type=SECONDS, required=True, help="How long, such as 1h; 0 unpins.")
def pin(
    path: Path | None,
    worker: str | None,
    keys: tuple[str, ...],
    prompt: Path | None,
    tokenizer: str | None,
    hash_seed: str,
    tenant: str,
    seconds: float,
) -> int:
    """Keep blocks, by their KEYS or those of a prompt, for a while: they are not evicted."""
    from penstock_kv.tiers.tier_admin_protocol import AskStat, BlocksCounted, CacheStat, PinBlocks

    if bool(keys) == (prompt is not None):
        raise click.UsageError("say which blocks: KEYS, as 'penstock cache ls' shows them, or --prompt")
    client = _client(path, worker)
    hashes: list[bytes] = []
    if prompt is not None:
        if tokenizer is None:
            raise click.UsageError("--prompt needs --tokenizer")
        from penstock_kv.tiers.vllm_block_hashes import prompt_hashes

        hashes = prompt_hashes(prompt.read_text(), tokenizer, client.ask(AskStat(), CacheStat), hash_seed)
    ask = PinBlocks(keys=list(keys), hashes=hashes, tenant=tenant, seconds=seconds)
    count = client.ask(ask, BlocksCounted).blocks
    wanted = len(keys) + len(hashes)
    done = f"pinned for {seconds_text(seconds)}" if seconds else "no longer pinned"
    click.echo(f"{count} of {wanted} blocks are in the tiers, and are {done}.")
    return 0 if count else 1


@command.command("clear", epilog=EPILOG)
@_target
@_TIER
def clear(path: Path | None, worker: str | None, tier: str | None) -> int:
    """Drop all blocks of a tier, or of all tiers."""
    from penstock_kv.tiers.tier_admin_protocol import BlocksCounted, ClearTiers

    count = _client(path, worker).ask(ClearTiers(tier=tier or ""), BlocksCounted).blocks
    click.echo(f"Dropped from {tier or 'all tiers'}: {counted(count, 'block')}.")
    return 0


@command.command("verify", epilog=EPILOG)
@_target
@_TIER
@click.option("--rate", type=RATE, default="50MB/s", show_default=True, help="How fast it reads.")
@click.option("--bytes/--no-bytes", "reads", default=True, help="Whether blocks are read again.  [default: bytes]")
@click.option("--index/--no-index", default=None, help="Whether routers are asked.  [default: where one answers]")
@cluster_options
def verify(
    client: AdminClient,
    path: Path | None,
    worker: str | None,
    tier: str | None,
    rate: float,
    reads: bool,
    index: bool | None,
) -> int:
    """Read blocks again and check them, and compare the tiers with what routers believe of them.

    Wrong blocks are dropped. The exit status is 1 where there are any, or a router knows other blocks than there are.
    """
    tiers = _client(path, worker)
    wrong = _wrong_bytes(tiers, tier, rate) if reads else 0
    differs = index is not False and _index_differs(tiers, client, must=index is True)
    return 1 if wrong or differs else 0


def _index_differs(tiers: "TierAdminClient", cluster: AdminClient, *, must: bool) -> bool:
    """Compare routers with the tiers and show it; where no frontend answers, that is an error only if it ``must``."""
    from penstock_kv.cli.cache_index import compare

    try:
        differences = compare(tiers, cluster)
    except (ClusterUnreachable, RequestRefused) as error:
        if must:
            raise
        click.echo(f"index: not compared: {error}")
        return False
    for each in differences:
        click.echo(each.text())
    if not differences:
        click.echo("index: not compared, since no engine is connected")
    return any(each.wrong for each in differences)


def _wrong_bytes(client: "TierAdminClient", tier: str | None, rate: float) -> int:
    """Read all blocks again; return how many are wrong."""
    from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat, TierVerified, VerifyTier

    wrong = 0
    for name in [tier] if tier else [each.tier for each in client.ask(AskStat(), CacheStat).tiers]:
        outcomes: dict[str, int] = {}
        keys: list[str] = []
        after: str | None = ""
        while after is not None:
            part = client.ask(VerifyTier(tier=name, after=after, rate=rate), TierVerified)
            keys += part.wrong
            for outcome, count in part.outcomes.items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
            after = part.last or None
        shown = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items())) or "no blocks"
        click.echo(f"{name}: {shown}")
        for key in keys:
            click.echo(f"  {key} is wrong, and is never read again")
        wrong += len(keys)
    return wrong


@command.command("serve", epilog=EPILOG)
@click.option("--socket", "path", type=click.Path(path_type=Path), required=True, help="Where engines connect.")
@click.option("--settings", "given", help="Settings of the tiers as JSON, instead of the options below.")
@click.option("--host", "host", type=BYTES, help="Host memory for blocks, such as 8GiB.")
@click.option("--disk", type=BYTES, default=0, help="Disk for blocks.")
@click.option("--disk-dir", "folders", multiple=True, help="Folder of the disk tier; one for each device.")
@click.option("--object-url", help="Object store, such as s3://BUCKET/PREFIX.")
@click.option(
    "--order",
    type=click.Choice(["lru", "priority"]),
    default="priority",
    help="Which block gives way.",
)
@click.option("--name", help="Name of the engine, for its peers.  [default: the socket's]")
@click.option("--peer", "named", multiple=True, metavar="NAME=HOST:PORT", help="Tier process of another engine.")
@click.option("--peer-listen", metavar="HOST:PORT", help="Where peers reach this one; without it there are no peers.")
@click.option("--peers-nixl", is_flag=True, help="Read peers' blocks by NIXL where they have it, in a trusted network.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=0, help="Where Prometheus reads; 0 is nowhere.")
def serve(
    path: Path,
    given: str | None,
    host: float | None,
    disk: float,
    folders: tuple[str, ...],
    object_url: str | None,
    order: str,
    name: str | None,
    named: tuple[str, ...],
    peer_listen: str | None,
    peers_nixl: bool,
    metrics_port: int,
) -> int:
    """Run a tier process by hand, until Ctrl-C; the supervisor runs the same beside each engine.

    Peers need PENSTOCK_CLUSTER_SECRET, the same for all. Those whose sockets are in the same folder need no --peer.
    """
    import os

    from penstock.config.reading.tree_check import settings_of_json
    from penstock.frontend import logs
    from penstock_kv.cache_settings import CacheSettings
    from penstock_kv.tiers.tier_process import run_tiers

    if (given is None) == (host is None):
        raise click.UsageError("give --host, or --settings")
    chosen: dict[str, object] = {
        "host": int(host or 0),
        "disk": int(disk),
        "disk_dirs": folders,
        "object_url": object_url,
        "order": order,
        "peers_nixl": peers_nixl,
        "metrics_port": metrics_port,
    }
    settings = settings_of_json(CacheSettings, json.dumps(chosen) if given is None else given, "--settings")
    logs.setup("text", "info")
    peers = None
    if peer_listen is not None:
        from penstock.config.cluster_secret_file import SECRET_ENV, secret_of_env
        from penstock_kv.tiers.peer_tiers import PeerTiers

        secret = secret_of_env(os.environ)
        if secret is None:
            raise click.UsageError(f"peers know each other by the cluster's secret: set {SECRET_ENV}")
        others = {each.partition("=")[0]: address_of(each.partition("=")[2]) for each in named}
        peers = PeerTiers(
            name or path.stem, secret, address_of(peer_listen), path.parent, others, nixl=settings.peers_nixl
        )
    return asyncio.run(run_tiers(settings, path, peers=peers))


def _client(path: Path | None, worker: str | None) -> "TierAdminClient":
    """Connect to the tier process that is meant: the only one of this user that answers, where none is named."""
    from penstock.kernel.errors import ConfigError
    from penstock_kv.tiers.tier_admin_client import TierAdminClient, sockets

    if path is not None:
        return TierAdminClient(path)
    clients: dict[str, TierAdminClient] = {}
    for each in sockets():
        if worker in (None, each.stem):
            try:
                clients[each.stem] = TierAdminClient(each)
            except ConfigError:
                continue  # left behind by a process that was killed
    if len(clients) != 1:
        names = ", ".join(clients) or "none"
        raise ConfigError(
            f"{len(clients)} tier processes of this user answer: {names}",
            hint="name one with --worker, or its socket with --socket",
        )
    return next(iter(clients.values()))


def _stat_text(stat: "CacheStat") -> str:
    rows = [
        [
            tier.tier,
            tier.blocks,
            tier.capacity,
            f"{100 * tier.blocks / tier.capacity:.1f} %",
            tier.pinned,
            tier.hits,
            tier.stored,
            tier.removed,
            _readable_size(tier.bytes_in),
            _readable_size(tier.bytes_out),
            ", ".join(f"{count} {outcome}" for outcome, count in tier.failures.items()),
        ]
        for tier in stat.tiers
    ]
    headings = ["tier", "blocks", "room", "full", "pinned", "hits", "stored", "removed", "in", "out", "failures"]
    hits, misses = sum(tier.hits for tier in stat.tiers), sum(stat.misses.values())
    share = f"{100 * hits / (hits + misses):.1f} %" if hits + misses else "unknown"
    lines = [
        f"{stat.model or 'no engine yet'}: blocks of {stat.block_tokens} tokens, {_readable_size(stat.block_bytes)}; "
        f"engines {', '.join(stat.engines) or 'none'}",
        table(headings, rows) if rows else "No tier is open.",
        f"Hit rate {share} of the blocks asked for; misses: {_list_counts(stat.misses)}",
        f"Under way: {stat.open_jobs} jobs, {stat.open_moves} moves; refused: {_list_counts(stat.refused)}",
        f"Prefill: {_speed_text(stat.seconds_per_token)}",
        f"Leaks: {'; '.join(stat.leaks) or 'none'}",
    ]
    return "\n".join(lines)


def _speed_text(seconds_per_token: float) -> str:
    if not seconds_per_token:
        return "speed unknown, so all that is there is loaded"
    return f"{1 / seconds_per_token:,.0f} tokens/s at best; what takes longer to load is computed"


def _list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"


def _readable_size(size: int) -> str:
    for unit, length in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= length:
            return f"{size / length:.1f} {unit}"
    return f"{size} B"
