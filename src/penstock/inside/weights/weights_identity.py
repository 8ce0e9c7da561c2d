"""Weights identity: a digest of the files that a model or an adapter was loaded from, which is part of a block's key.

Equal files have one identity on every machine, so hosts share blocks. A file that changed while its engine ran may not
be what the engine has in memory: then the identity is one that no other engine has.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

log = logging.getLogger("vllm.penstock")

LOADED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model")
"""Endings of files that decide what a model computes; texts and scripts beside them do not."""
BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""File names in a Hugging Face cache's ``blobs``: digests of what is in them."""
THREADS = 8
"""Files that are read at once: an engine has just read them, so they come from memory at some GB/s."""

_HOME = Path(os.environ.get("HOME") or "/nonexistent")

Signature = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, time of change of content and of the inode in nanoseconds, and number of the inode of each file."""


def signature(path: str) -> Signature:
    """Return what the file system says of the files at a path; it differs once one of them is another.

    Raises:
        OSError: there is none.
    """
    stats = ((name, file.stat()) for name, file in _weight_files(Path(path)))
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino) for name, each in stats)


def identity(path: str, settled: float | None = None, cache: Path | None = None) -> str:
    """Return the identity of the files at a path.

    Args:
        path: folder, or one file.
        settled: wall clock before which the files must have become what they are; None takes them as they are.
        cache: file of digests that were computed before.
    Returns: 32 hexadecimal digits; other ones each time where the files are not there or not settled.
    """
    known = _read_digest_cache(cache)
    try:
        before = signature(path)
        with ThreadPoolExecutor(THREADS) as threads:
            weights = (file for _, file in _weight_files(Path(path)))
            digests = dict(zip(before, threads.map(lambda file: _file_digest(file, known), weights)))
        if signature(path) != before or not before:
            raise OSError("its files change")
        fresh = [name for name, _, _, changed, _ in before if settled is not None and changed > settled * 1e9]
        linked = {name for name, file in _weight_files(Path(path)) if _blob(file)}
        if set(fresh) - linked:
            raise OSError(f"{min(set(fresh) - linked)} was written after the engine began to load")
    except OSError as error:
        log.warning(
            "what is at %s can't be told from other weights, so its KV is kept for this engine alone: %s", path, error
        )
        return secrets.token_hex(16)
    _write_digest_cache(cache, known)
    whole = sorted((name, digest) for (name, *_), digest in digests.items())
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).hexdigest()


def weights_identity(model: str, revision: str = "") -> str:
    """Return the identity of the weights that this process has loaded.

    Args:
        model: folder, file, or name in a Hugging Face cache.
        revision: of that name; without one, the only one that the cache has.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or _HOME / ".cache") / "penstock" / "weights.json"
    return identity(model if Path(model).exists() else _snapshot(model, revision), _process_began(), cache)


def _snapshot(model: str, revision: str) -> str:
    hub = os.environ.get("HF_HUB_CACHE") or f"{os.environ.get('HF_HOME') or _HOME / '.cache/huggingface'}/hub"
    folder = Path(hub) / f"models--{model.replace('/', '--')}"
    named = folder / "refs" / revision
    commit = named.read_text().strip() if revision and named.is_file() else revision
    there = [each for each in folder.glob("snapshots/*") if not commit or each.name == commit]
    return str(there[0] if len(there) == 1 else folder / f"snapshots/{commit or '*'}")


def _process_began() -> float:
    """Return the wall clock at which this process began, in seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class AdapterIdentities:
    """Identities of an engine's LoRA adapters, as of when each was loaded."""

    def __init__(self) -> None:
        self._loaded: dict[int, tuple[Signature, str]] = {}
        self._changed: dict[tuple[int, Signature], str] = {}

    def loading(self, number: int, path: str) -> None:
        """An adapter is about to be loaded, the first time or again."""
        self._changed = {key: value for key, value in self._changed.items() if key[0] != number}
        try:
            self._loaded[number] = signature(path), identity(path)
        except OSError:
            self._loaded.pop(number, None)

    def of(self, number: int, path: str) -> str:
        """Return the identity of an adapter that a request names: of no use to others where its files have changed."""
        try:
            now = signature(path)
        except OSError:
            now = ()
        before = self._loaded.get(number)
        if before is not None and before[0] == now:
            return before[1]
        return self._changed.setdefault((number, now), secrets.token_hex(16))


def _weight_files(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield path.name, path
        return
    for entry in sorted(path.iterdir()):
        if entry.suffix in LOADED and entry.is_file():
            yield entry.name, entry


def _blob(file: Path) -> str | None:
    """Return the digest that a Hugging Face cache has as the name of a file's content."""
    target = file.readlink() if file.is_symlink() else file
    return target.name if target.parent.name == "blobs" and BLOB.fullmatch(target.name) else None


def _file_digest(file: Path, known: dict[str, str]) -> str:
    if (blob := _blob(file)) is not None:
        return blob
    stat = file.stat()
    key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    if key not in known:
        with file.open("rb") as content:
            known[key] = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return known[key]


def _read_digest_cache(cache: Path | None) -> dict[str, str]:
    try:
        found: Any = json.loads(cache.read_text()) if cache is not None else {}
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, Mapping) else {}


def _write_digest_cache(cache: Path | None, known: dict[str, str]) -> None:
    """Keep digests for the next start; without that they are computed again."""
    if cache is None:
        return
    part = cache.with_suffix(f".{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known))
        part.replace(cache)
    except OSError as error:
        log.info("digests of weights are not kept: %s", error)
