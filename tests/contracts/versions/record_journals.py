"""Journals of a short run, which today's machines are to repeat effect by effect.

usage: PYTHONPATH=src python tests/contracts/versions/record_journals.py

The files in data/journals are made again where a router's or fleet's snapshot gets another version, or its effects
other fields: never to silence a decision that came out differently.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

TARGET = Path(__file__).parent / "data/journals"
WORDS = ["--frontend.port", "0", "--set", "models.sim.pools.main.replicas=2", "--set", "engine_stats.interval=0"]


def run(folder: str) -> Path:
    """Run a cluster in a folder, send it requests, end it; return its journals."""
    env = {**os.environ, "PENSTOCK_STATE_DIR": f"{folder}/state", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "penstock", "up", *WORDS]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = ""
        while "Ctrl-C" not in text:
            text += process.stdout.readline()
        found = re.search(r"Endpoint\s+(\S+)/v1", text)
        assert found is not None
        for number in range(12):
            words = "word " * (50 + number % 3 * 40)
            chat = {"model": "sim", "messages": [{"role": "user", "content": words}], "max_tokens": 6}
            body = json.dumps({**chat, "stream": number % 2 == 0}).encode()
            headers = {"content-type": "application/json"}
            url = f"{found.group(1)}/v1/chat/completions"
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as answer:
                answer.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    return next(Path(folder, "runs").glob("*/journal"))


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        journals = run(folder)
        for machine in ("frontend-0", "fleet"):
            shutil.copy(next(journals.glob(f"{machine}*/000000")), TARGET / f"{machine}.journal")


if __name__ == "__main__":
    main()
