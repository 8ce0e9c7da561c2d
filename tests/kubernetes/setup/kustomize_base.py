"""Writes deploy/kubernetes/operator.yaml, the operator's objects for kustomize, from the chart: one source for both.

python -m tests.kubernetes.setup.kustomize_base HELM
"""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "penstock"
BASE = ROOT / "deploy" / "kubernetes" / "operator.yaml"
HEAD = "# Made from the chart by tests/kubernetes/setup/kustomize_base.py; a test fails when it is stale.\n"
HELMS = ("helm.sh/chart", "app.kubernetes.io/managed-by")


def base_text(helm: str) -> str:
    """Return the operator's objects as the chart makes them, without helm's own labels."""
    command = [helm, "template", "penstock", str(CHART), "--namespace", "penstock", "--set", "crds.install=false"]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = [each for each in yaml.safe_load_all(rendered) if each]
    for each in objects:
        for labels in _labels(each):
            for name in HELMS:
                labels.pop(name, None)
    return HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def _labels(item: dict[str, object]) -> list[dict[str, str]]:
    spec = item.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    return [each["metadata"].get("labels", {}) for each in (item, template) if each]  # type: ignore[index]


if __name__ == "__main__":
    BASE.write_text(base_text(sys.argv[1]))
