"""What a release is refused for, and where its version stands."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from tests.release.release_script import ROOT, copied, script

release: Any = script()
CHANGES = "# Changelog\n\n## 9.9.9\n\nAll of it.\n\n## 0.1.0\n\nThe first.\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that have the version, and a CHANGELOG with a version to come."""
    folder = copied(tmp_path, *release.PLACES)
    (folder / "CHANGELOG.md").write_text(CHANGES)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert release.main(arguments) == 2
    return capsys.readouterr().err


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def test_the_version_stands_in_one_place_and_its_copies_agree() -> None:
    assert release.versions(ROOT) == {name: {__version__} for name in release.PLACES}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == release.ONE_PLACE


def test_the_changelog_has_this_version_on_one_page() -> None:
    notes = release.section((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert 200 < len(notes.split()) <= 1_200, "a page that a user reads"


def test_a_version_is_written_into_every_place(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (checkout / name).read_text().count(__version__) for name in release.PLACES}
    assert release.main(["9.9.9", "--set", "--root", str(checkout)]) == 0
    assert release.versions(checkout) == {name: {"9.9.9"} for name in release.PLACES}
    assert {name: (checkout / name).read_text().count("9.9.9") for name in release.PLACES} == before
    assert capsys.readouterr().out.count("wrote 9.9.9 into") == len(release.PLACES)
    assert release.checked(checkout, "9.9.9") == "All of it.\n"


@pytest.mark.parametrize("version", ["", "1", "v1.2.3", "1.2", "01.2.3", "1.2.3rc1"])
def test_what_is_not_three_numbers_is_refused(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not X.Y.Z" in refusal(capsys, version)


def test_a_checkout_of_another_version_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "9.9.9", "--root", str(checkout), "--dist", str(checkout / "dist"))
    assert f"{release.ONE_PLACE} has {__version__}" in told and "make version VERSION=9.9.9" in told
    assert not (checkout / "dist").exists(), "nothing was made"


@pytest.mark.parametrize("text", ["# Changelog\n", "# Changelog\n\n## 9.9.9\n\n## 0.1.0\n\nThe first.\n"])
def test_a_version_that_the_changelog_does_not_have_is_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    release.main(["9.9.9", "--set", "--root", str(checkout)])
    (checkout / "CHANGELOG.md").write_text(text)
    assert "no section `## 9.9.9`" in refusal(capsys, "9.9.9", "--root", str(checkout))


def test_what_is_not_committed_is_refused_and_a_tag_is_followed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release.main(["9.9.9", "--set", "--root", str(checkout)])
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "All")
    assert release.checked(checkout, "9.9.9")
    for tag in ("v9.9.8", "v9.9.10-rc.1", "v9.9.7", "note"):
        git(checkout, "tag", tag)
    assert release.checked(checkout, "9.9.9")
    git(checkout, "tag", "v9.10.0")
    assert "after the tag v9.10.0 comes 9.10.1, 9.11.0 or 10.0.0, not 9.9.9" in refusal(
        capsys, "9.9.9", "--root", str(checkout)
    )
    (checkout / "CHANGELOG.md").write_text(f"{CHANGES}\n")
    assert "not committed" in refusal(capsys, "9.9.9", "--root", str(checkout))


@pytest.mark.parametrize(
    ("before", "version", "follows"),
    [
        ("0.1.0", "0.1.1", True),
        ("0.1.9", "0.2.0", True),
        ("0.2.3", "1.0.0", True),
        ("0.1.0", "0.1.0", False),
        ("0.1.0", "0.1.2", False),
        ("0.1.1", "0.2.1", False),
        ("0.10.0", "0.9.0", False),
    ],
)
def test_versions_follow_each_other_as_semver_has_it(before: str, version: str, follows: bool) -> None:
    if follows:
        release.follow(before, version)
    else:
        with pytest.raises(release.Refused):
            release.follow(before, version)


def test_a_missing_program_leaves_its_step_out_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_K8S_PROGRAMS", raising=False)
    assert "no helm" in release.chart(tmp_path, "9.9.9", tmp_path)
    assert "no buildah" in release.image(tmp_path, "9.9.9", tmp_path, None)


def test_the_next_steps_are_those_for_what_was_made(tmp_path: Path) -> None:
    few = release.next_steps("9.9.9", tmp_path, ["penstock-9.9.9-py3-none-any.whl"])
    assert "git tag --sign v9.9.9" in few and "twine upload" in few and "gpg" in few
    assert not re.search("helm|buildah|auditwheel", few)
    names = ["penstock-9.9.9.tgz", "penstock-9.9.9-image.tar", "penstock-9.9.9-cp311-cp311-linux_x86_64.whl"]
    steps = release.next_steps("9.9.9", tmp_path, names)
    assert all(word in steps for word in ("helm push", "docker://", "auditwheel"))
