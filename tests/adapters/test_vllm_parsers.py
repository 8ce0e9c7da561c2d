"""An engine's own parsers: their flags at the start, and names that an installed vLLM has or has not."""

import stat
import sys
from pathlib import Path

import pytest

from penstock.adapters.engines.launch import launch_of
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.adapters.engines.vllm_parsers import EngineParsers, check_parsers, installed_parsers
from penstock.config.settings.cluster_settings import EngineKind, PoolSettings
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.pod_launch import pod_launch


def argv_of(engine: EngineKind, **pool: object) -> str:
    return " ".join(launch_of("w", "m", PoolSettings(engine=engine, **pool), port=9999, in_pod=True).argv)  # type: ignore[arg-type]


def test_engines_that_are_started_here_get_their_own_flags() -> None:
    names = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    flags = argv_of("vllm", **names)
    assert "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3" in flags
    assert "--jinja --reasoning-format deepseek" in argv_of("llamacpp", command="llama-server", model_path="x", **names)
    assert "parser" not in argv_of("vllm")
    sglang = PoolSettings(engine="sglang", **names)  # type: ignore[arg-type]
    words = " ".join(pod_launch("w", "m", sglang, 0).argv)
    assert "--tool-call-parser hermes" in words and "--reasoning-parser qwen3" in words


@pytest.mark.parametrize(
    "pool",
    [
        PoolSettings(engine="vllm", tool_parser="penstock:hermes"),
        PoolSettings(engine="vllm", tool_parser="hermes", urls=("http://x",)),
        PoolSettings(engine="llamacpp", tool_parser="hermes", command="python", model_path="x"),
        PoolSettings(engine="sim", tool_parser="hermes"),
    ],
    ids=["by its prefix", "attached", "llama.cpp's Python server", "simulated"],
)
def test_other_engines_get_a_label_and_no_flag(pool: PoolSettings) -> None:
    assert overrides_of(pool)["labels"]["tool_parser"] == pool.tool_parser
    if not pool.attached:
        words = launch_of("w", "m", pool, port=9999, in_pod=True).argv
        assert "--jinja" not in words and "--tool-call-parser" not in words


def fake_vllm(folder: Path) -> str:
    """Make a vLLM whose environment has two lists, and nothing else."""
    for name, manager, names in (("tool_parsers", "Tool", ["hermes", "xlam"]), ("reasoning", "Reasoning", ["qwen3"])):
        package = folder / "site/vllm" / name
        package.mkdir(parents=True)
        text = f"class {manager}ParserManager:\n    list_registered = staticmethod(lambda: {names})\nprint('noise')\n"
        (package / "__init__.py").write_text(text)
    (folder / "site/vllm/__init__.py").write_text("")
    (folder / "bin").mkdir()
    python = folder / "bin/python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/site exec {sys.executable} "$@"\n')
    program = folder / "bin/vllm"
    program.write_text("#!/bin/sh\n")
    for file in (python, program):
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_the_installed_vllm_is_asked_for_its_names(tmp_path: Path) -> None:
    parsers = installed_parsers(fake_vllm(tmp_path))
    assert parsers == EngineParsers(("hermes", "xlam"), ("qwen3",))
    check_parsers(PoolSettings(engine="vllm", tool_parser="xlam", reasoning_parser="qwen3"), parsers)
    check_parsers(PoolSettings(engine="vllm", tool_parser="penstock:mistral"), parsers)
    with pytest.raises(ConfigError, match="no tool-call parser 'mistral'") as error:
        check_parsers(PoolSettings(engine="vllm", tool_parser="mistral"), parsers)
    assert error.value.hint == "its parsers are hermes, xlam; or penstock:mistral, which Penstock parses"
    with pytest.raises(ConfigError, match="no reasoning parser 'qwen4'"):
        check_parsers(PoolSettings(engine="vllm", reasoning_parser="qwen4"), parsers)


def test_a_program_that_does_not_answer_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    assert installed_parsers(str(tmp_path / "vllm")) is None and installed_parsers("no-such-vllm") is None
