"""Does a folder of embeddings stay within its bytes, and does nobody lose a file that it was told is there?"""

import os
from pathlib import Path

import pytest

from penstock_kv.inside.embeddings import embedding_folder
from penstock_kv.inside.embeddings.embedding_folder import FILE, EmbeddingFolder


def put(folder: EmbeddingFolder, name: str, size: int = 1000) -> bool:
    return folder.write(name, lambda file: file.write_bytes(name.encode().ljust(size)) and None)


def names(path: Path) -> set[str]:
    return {file.parent.name for file in path.glob(f"*/{FILE}")}


def older(path: Path, *order: str) -> None:
    """Let files have been used in this order, a second apart."""
    for at, name in enumerate(order):
        os.utime(path / name / FILE, (1000 + at, 1000 + at))


def test_the_files_used_least_lately_make_room(tmp_path: Path) -> None:
    writer, reader = EmbeddingFolder(tmp_path, 3000, "w"), EmbeddingFolder(tmp_path, None, "r")
    for name in "abc":
        assert put(writer, name)
    older(tmp_path, "a", "b", "c")
    assert reader.pin("a") and not reader.pin("x")
    put(writer, "d")
    assert names(tmp_path) == {"a", "c", "d"}, "a was used after b"
    for number in range(20):
        put(writer, f"n{number}")
        assert len(names(tmp_path)) <= 3
    assert not reader.pin("a") or reader.pinned("a").exists()


def test_what_was_said_to_be_there_can_be_read_after_it_was_deleted(tmp_path: Path) -> None:
    writer, reader = EmbeddingFolder(tmp_path, 2000, "w"), EmbeddingFolder(tmp_path, None, "r")
    put(writer, "a")
    assert reader.pin("a")
    for name in "bcd":
        put(writer, name)
        older(tmp_path, *sorted(names(tmp_path)))
    assert "a" not in names(tmp_path)
    assert reader.pinned("a").read_bytes().startswith(b"a")
    assert EmbeddingFolder(tmp_path, None, "s").pin("a") is False


def test_links_go_once_nobody_can_need_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, dead = EmbeddingFolder(tmp_path, 2000, "w"), EmbeddingFolder(tmp_path, None, "dead")
    put(writer, "a")
    put(writer, "b")
    assert dead.pin("a")
    os.utime(dead.pinned("a"), (1, 1))
    monkeypatch.setattr(embedding_folder, "PIN_SECONDS", 0.0)
    reader = EmbeddingFolder(tmp_path, None, "r")
    os.utime(tmp_path / "b" / FILE)
    monkeypatch.setattr(embedding_folder, "PIN_SECONDS", 60.0)
    reader._swept -= 60.0
    assert reader.pin("b") and reader.pinned("b").exists() and not dead.pinned("a").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".pins", "a" * 200, "a\n"])
def test_a_name_that_could_be_a_path_is_no_file(tmp_path: Path, name: str) -> None:
    folder = EmbeddingFolder(tmp_path / "in", 1000, "w")
    before = sorted(tmp_path.rglob("*"))
    assert put(folder, name) is False and folder.pin(name) is False
    assert sorted(tmp_path.rglob("*")) == before


def test_a_write_that_fails_leaves_nothing_that_could_be_read(tmp_path: Path) -> None:
    folder = EmbeddingFolder(tmp_path, 1000, "w")

    def broken(file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        folder.write("a", broken)
    assert not folder.pin("a") and not names(tmp_path)
