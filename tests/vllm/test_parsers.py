"""Do our tool-call parsers read what vLLM's own read, and does vLLM tell us the names of its parsers?"""

import json
import subprocess
from pathlib import Path

import pytest

from penstock.adapters.engines.vllm_parsers import check_parsers, installed_parsers
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from tests.frontend.parsers.answers import ANSWERS, WEATHER

SCRIPT = Path(__file__).parent / "setup/parse.py"


def test_answers_read_as_vllm_reads_them(venv: Path) -> None:
    answers = [answer for answer in ANSWERS if answer.theirs]
    cases = json.dumps([[answer.parser, answer.text, WEATHER] for answer in answers])
    done = subprocess.run(
        [venv / "bin/python", SCRIPT], input=cases, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])
    for answer, (content, calls) in zip(answers, results, strict=True):
        assert content == answer.content, answer
        assert [(name, arguments) for name, arguments in calls] == list(answer.calls), answer


def test_it_tells_the_names_of_its_parsers(venv: Path) -> None:
    parsers = installed_parsers(str(venv / "bin/vllm"))
    assert parsers is not None and "hermes" in parsers.tools and "qwen3" in parsers.reasoning
    check_parsers(PoolSettings(engine="vllm", tool_parser="hermes", reasoning_parser="qwen3"), parsers)
    with pytest.raises(ConfigError, match="no tool-call parser 'hermess'"):
        check_parsers(PoolSettings(engine="vllm", tool_parser="hermess"), parsers)
