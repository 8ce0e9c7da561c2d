"""A served cluster whose engines render, generate and derender: `penstock explain` says how requests were answered."""

from pathlib import Path

from penstock_lab.report.run.run_files import recorded_explanation
from tests.live.cluster import served
from tests.live.test_operate import penstock

ROUTES = ["--set", "models.sim.render=engine", "--set", "models.sim.pools.main.args=[--enable-scale-out]"]


def test_a_served_cluster_answers_by_rendered_tokens(tmp_path: Path) -> None:
    words = ["--set", "models.sim.pools.main.replicas=2", "--set", "frontend.port=0"]
    with served(tmp_path, "up", *ROUTES, *words) as up:
        status, whole, headers = up.chat("Name a city.", max_tokens=12)
        assert status == 200 and whole["usage"]["completion_tokens"] == 12
        text = penstock(up, "explain", headers["x-request-id"])
        assert "generated of tokens, put into words by http://127.0.0.1:" in text
        status, _, headers = up.chat("Name a city.", n=2)
        assert status == 200
        text = penstock(up, "explain", headers["x-request-id"])
        assert "its prompt went to the engine as it was: it asks for several answers" in text
    ended = recorded_explanation(up.run, headers["x-request-id"]).request
    assert ended is not None and "it asks for several answers" in ended.way, "the record has it, too"
