"""Are equal files one identity everywhere, and is what changed under an engine never taken for what it has?"""

import os
import shutil
import time
from pathlib import Path

import pytest

from penstock.inside.weights import weights_identity as subject
from penstock.inside.weights.weights_identity import AdapterIdentities, identity, weights_identity


def checkpoint(folder: Path, content: bytes = b"weights" * 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    (folder / "model.safetensors").write_bytes(content)
    (folder / "README.md").write_text("no weights")
    return folder


def test_equal_files_are_one_identity_whatever_their_folder_and_times(tmp_path: Path) -> None:
    here, there = checkpoint(tmp_path / "a"), checkpoint(tmp_path / "b")
    os.utime(there / "model.safetensors", (1, 1))
    (there / "README.md").write_text("other words")
    assert identity(str(here)) == identity(str(there)) == identity(str(here))


@pytest.mark.parametrize("change", ["byte", "same size and time", "config", "gone", "more", "renamed"])
def test_any_change_of_what_is_loaded_is_another_identity(tmp_path: Path, change: str) -> None:
    folder, cache = checkpoint(tmp_path / "a"), tmp_path / "cache" / "weights.json"
    before, file = identity(str(folder), cache=cache), folder / "model.safetensors"
    assert identity(str(folder), cache=cache) == before
    stat = file.stat()
    if change in ("byte", "same size and time"):
        with file.open("r+b") as content:
            content.seek(4321)
            content.write(b"!")
        if change != "byte":
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "config":
        (folder / "config.json").write_text('{"rope_theta": 99999}')
    elif change == "gone":
        file.unlink()
    elif change == "more":
        (folder / "model-2.safetensors").write_bytes(b"")
    else:
        file.rename(folder / "other.safetensors")
    assert identity(str(folder), cache=cache) != before


def test_files_that_were_written_while_the_engine_ran_are_known_to_this_engine_alone(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    assert identity(str(folder), settled=time.time() - 60) != identity(str(folder), settled=time.time() - 60)
    assert identity(str(folder), settled=time.time() + 60) == identity(str(folder))
    assert weights_identity(str(folder)) != weights_identity(str(folder)), "this process is older than the files"


def test_no_files_have_no_common_identity(tmp_path: Path) -> None:
    assert identity(str(tmp_path / "none")) != identity(str(tmp_path / "none"))
    assert identity(str(tmp_path)) != identity(str(tmp_path))


def test_the_digests_of_a_hub_cache_are_the_names_of_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "models--org--name"
    for revision, name in (("a" * 40, "1" * 64), ("b" * 40, "2" * 64)):
        blob, snapshot = repository / "blobs" / name, repository / "snapshots" / revision
        blob.parent.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        blob.write_bytes(name.encode())
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{name}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    first, second = weights_identity("org/name", "main"), weights_identity("org/name", "b" * 40)
    assert first == weights_identity("org/name", "a" * 40) and first != second
    assert weights_identity("org/name") != weights_identity("org/name"), "which of the two was loaded is not known"
    shutil.rmtree(repository / "snapshots" / ("b" * 40))
    assert weights_identity("org/name") == first


def test_an_unreadable_cache_of_digests_costs_time_only(tmp_path: Path) -> None:
    folder, cache = checkpoint(tmp_path / "a"), tmp_path / "weights.json"
    cache.write_text("[1")
    before = identity(str(folder), cache=cache)
    cache.write_text("[]")
    assert (
        identity(str(folder), cache=cache)
        == before
        == identity(str(folder), cache=tmp_path / "a" / "config.json" / "x")
    )


def test_an_adapter_is_what_was_loaded_and_a_file_that_changed_since_is_nobody_elses(tmp_path: Path) -> None:
    folder, adapters, others = checkpoint(tmp_path / "a"), AdapterIdentities(), AdapterIdentities()
    unknown = adapters.of(1, str(folder))
    assert unknown == adapters.of(1, str(folder)) != others.of(1, str(folder)), "nobody saw it being loaded"
    adapters.loading(1, str(folder))
    others.loading(7, str(folder))
    loaded = adapters.of(1, str(folder))
    assert loaded == others.of(7, str(folder)) == identity(str(folder))
    checkpoint(folder, b"other weights")  # vLLM may still have the old ones, or load these when it needs them again
    between = adapters.of(1, str(folder))
    assert between not in (loaded, identity(str(folder))) and between == adapters.of(1, str(folder))
    adapters.loading(1, str(folder))
    assert adapters.of(1, str(folder)) == identity(str(folder))
    checkpoint(folder)
    adapters.loading(1, str(folder))
    assert adapters.of(1, str(folder)) == loaded
    shutil.rmtree(folder)
    assert adapters.of(1, str(folder)) not in (loaded, between)


def test_the_clock_of_a_process_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "now").write_text("")
    assert subject._process_began() < (tmp_path / "now").stat().st_ctime
