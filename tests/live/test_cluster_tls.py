"""A cluster under a private CA: the banner's own commands work as printed, and a refusal by TLS names its cause."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificate import make_certificate
from tests.live.cluster import Served, served

FAST = ["--set", "models.sim.pools.main.sim.timing.speed_up=20", "--set", "models.sim.pools.main.replicas=1"]


def banner_commands(cluster: Served) -> tuple[dict[str, str], list[str]]:
    """Return what a banner exports and its command lines, without the one that draws on a terminal."""
    exports = dict(re.findall(r"(?m)^ {2}export (\w+)=(\S+)$", cluster.text))
    lines = re.findall(r"(?m)^ {2}((?:curl|\S*penstock) [^\n]+)$", cluster.text)
    return exports, [line for line in lines if " top" not in line]


def shell(folder: Path, line: str, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env={**env, **more}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("names", ["IP:127.0.0.1", "DNS:gateway.example"])
def test_the_banners_commands_work_under_the_clusters_own_certificate(tmp_path: Path, names: str) -> None:
    cert, key = make_certificate(tmp_path, names)
    tls = ["--frontend.security.tls_cert", cert, "--frontend.security.tls_key", key]
    with served(tmp_path, "up", "--frontend.port", "0", *tls, *FAST) as cluster:
        exports, lines = banner_commands(cluster)
        expected = {"PENSTOCK_CACERT": cert} if names.startswith("IP") else {"PENSTOCK_INSECURE": "1"}
        assert exports == expected
        assert [word for word in ("curl", "chat", "status", "bench") if any(f"{word} " in line for line in lines)] == [
            "curl", "chat", "status", "bench",
        ]  # fmt: skip
        for line in lines:
            if "bench" in line:
                line = line.replace("--requests 100", "--requests 5")
            done = shell(tmp_path, line, exports)
            assert done.returncode == 0 and done.stdout, f"{line}\n{done.stdout}{done.stderr}"
        refused = shell(tmp_path, f"penstock status --url {cluster.url}", {})
        assert refused.returncode == 1 and "is not trusted" in refused.stderr and "--cacert" in refused.stderr
        assert "penstock up" not in refused.stderr
        assert shell(tmp_path, f"penstock status --url {cluster.url} --insecure", {}).returncode == 0
        plain = shell(tmp_path, f"penstock status --url {cluster.url.replace('https', 'http')}", {})
        assert plain.returncode == 1 and "https://" in plain.stderr, plain.stderr


def test_https_to_a_server_without_it_says_so(tmp_path: Path) -> None:
    with served(tmp_path, "up", "--frontend.port", "0", *FAST) as cluster:
        done = shell(tmp_path, f"penstock status --url {cluster.url.replace('http', 'https')}", {})
        assert done.returncode == 1 and "does not speak TLS" in done.stderr and "http://" in done.stderr


def test_a_file_of_certificates_that_is_missing_is_named(tmp_path: Path) -> None:
    done = shell(tmp_path, "penstock status --url https://127.0.0.1:9 --cacert nowhere.pem", {})
    assert done.returncode == 2 and "nowhere.pem" in done.stderr
