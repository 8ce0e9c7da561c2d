"""The build's commit and date, in `penstock --version`: of a wheel, of a checkout, and of neither."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import penstock
from penstock.cli.shared.build_revision import build_revision

ROOT = Path(__file__).resolve().parents[2]


def checkout(folder: Path) -> str:
    """Make a checkout with one commit; return that."""
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    env = {**os.environ, **who, "GIT_COMMITTER_DATE": "2026-03-04T05:06:07Z"}
    (folder / "src" / "penstock").mkdir(parents=True)
    (folder / "src" / "penstock" / "__init__.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=folder, env=env, check=True, capture_output=True)
    named = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return named.stdout.strip()


def hook() -> types.ModuleType:
    """Return the build hook; hatchling itself is only there while something is built."""
    plugin = types.ModuleType("hatchling.builders.hooks.plugin.interface")
    names = ["hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"]
    before = {name: sys.modules.get(name) for name in (*names, plugin.__name__)}
    sys.modules.update({**{name: types.ModuleType(name) for name in names}, plugin.__name__: plugin})
    try:
        plugin.BuildHookInterface = type("Base", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})  # type: ignore[attr-defined]
        spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    return module


def test_a_checkout_is_named_by_its_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = checkout(tmp_path)
    package = tmp_path / "src" / "penstock" / "__init__.py"
    monkeypatch.setattr(penstock, "__file__", str(package))
    assert build_revision() == f"commit {commit} of 2026-03-04"
    package.write_text("changed = True")
    assert build_revision() == f"commit {commit}-dirty of 2026-03-04"


def test_a_wheel_has_what_its_builder_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = checkout(tmp_path)
    built = hook()
    text = built.revision(str(tmp_path))
    assert text == f"commit {commit} of 2026-03-04"
    wheel = built.Build()
    wheel.root, wheel.target_name = str(tmp_path), "wheel"
    data: dict[str, dict[str, str]] = {"force_include": {}}
    monkeypatch.delenv("HATCH_BUILD_HOOKS_ENABLE", raising=False)
    wheel.initialize("standard", data)
    ((source, target),) = data["force_include"].items()
    installed = tmp_path / "site-packages" / target
    installed.parent.mkdir(parents=True)
    Path(source).rename(installed)
    wheel.finalize("standard", data, "")
    monkeypatch.setattr(penstock, "__file__", str(installed.with_name("__init__.py")))
    assert build_revision() == text
    monkeypatch.setenv("PENSTOCK_COMMIT", "abc of 2026-01-02")
    assert built.revision(str(tmp_path / "nowhere")) == "commit abc of 2026-01-02"


def test_who_knows_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penstock, "__file__", str(tmp_path / "lib" / "penstock" / "__init__.py"))
    assert build_revision() == "unknown commit"
    monkeypatch.delenv("PENSTOCK_COMMIT", raising=False)
    assert hook().revision(str(tmp_path)) is None


def test_the_command_says_it(penstock) -> None:  # type: ignore[no-untyped-def]
    assert f", {build_revision()})" in penstock("--version").output
