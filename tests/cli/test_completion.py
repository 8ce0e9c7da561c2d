"""Does the shell complete what the running cluster has, and stay quiet where there is none?"""

import os
import subprocess
import sys

import pytest

from penstock.adapters.listen_address import free_port


def completed(words: str, url: str) -> list[str]:
    env = {
        **os.environ,
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "PENSTOCK_URL": url,
    }
    code = "import sys; from penstock.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("penstock dr", ["drain"]),
        ("penstock drain main-", ["main-0", "main-1"]),
        ("penstock flip main-1", ["main-1"]),
        ("penstock chat --model s", ["sim"]),
        ("penstock runs p", ["prune"]),
    ],
)
def test_names_are_completed(cluster, words, found):
    assert completed(words, cluster.url) == found


def test_nobody_there_is_no_error():
    assert completed("penstock drain ", f"http://127.0.0.1:{free_port()}") == []
