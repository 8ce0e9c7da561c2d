"""Run folder of a process in a pod: made at its start from the config that is mounted there."""

import os
from pathlib import Path

from penstock.config.reading.load import load_resolved
from penstock.kernel.errors import ConfigError
from penstock.runtime.records.run_folder import RunFolder

POD_IP = "$(POD_IP)"
"""In a config for pods: the address of the pod that reads it."""

POD_ENV = "PENSTOCK_POD"
"""Environment name of the pod's name, where each process of a cluster has a pod of its own."""


def run_folder_in_pod(config: Path) -> Path:
    """Return a new run folder, below ``runs.dir`` of a config.

    Raises:
        ConfigError: the config can't be read, or the folder not be written.
    """
    try:
        text = config.read_text().replace(POD_IP, os.environ.get("POD_IP", "127.0.0.1"))
    except OSError as error:
        raise ConfigError(f"{config} can't be read: {error.strerror}") from error
    root = load_resolved(config, os.environ).runs.dir
    return RunFolder.create(os.environ.get("PENSTOCK_RUNS__DIR", root), "pod", config=text).path


def process_name(index: int) -> str:
    """Return a frontend's name: its pod's, since in pods every process has the same number."""
    return os.environ.get(POD_ENV) or f"frontend-{index}-{os.getpid()}"
