"""Journals of a short run, and the snapshot of a router amid a request, as a version writes them.

usage: PYTHONPATH=CODE/src python record_journals.py FOLDER

It runs under the code of a version, as `record_messages.py` does, with that code in a folder whose name may be read by
all; its files are made once each, and go with the version's JSON.
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

from penstock.kernel.journal_frames import Frames, packed, read_header, read_record
from penstock.router.journal import event_of, router_of

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


def snapshot(segment: Path) -> bytes:
    """Return the last snapshot of a journal's router in which a request is open."""
    frames = list(Frames(segment.read_bytes()))
    router, last = router_of(read_header(frames[0])), b""
    for payload in frames[1:]:
        record = read_record(payload)
        router.handle(record.now, event_of(record, router.form))
        if router.requests:
            last = packed(router.snapshot())
    return last


def main(target: Path) -> None:
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        journals = run(folder)
        for machine in ("frontend-0", "fleet"):
            segment = next(journals.glob(f"{machine}*/000000"))
            shutil.copy(segment, target / f"{machine}.journal")
        (target / "router.snapshot").write_bytes(snapshot(target / "frontend-0.journal"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
