"""Does an autoscaler that follows the guide come to the planner's number?"""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

GUIDE = Path(__file__).parents[2] / "docs/guides/kubernetes.md"
USUAL = 0.1
"""Kubernetes' own tolerance."""


@pytest.fixture(scope="module")
def autoscaler() -> Any:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    objects = [each for block in blocks for each in yaml.safe_load_all(block) if isinstance(each, dict)]
    return next(each["spec"] for each in objects if each.get("kind") == "HorizontalPodAutoscaler")


def wanted(spec: Any, replicas: int, metric: float, *, usual: bool = False) -> int:
    """Return the replicas that Kubernetes' formula comes to for an external metric with a target per replica."""
    target = float(spec["metrics"][0]["external"]["target"]["averageValue"])
    direction = "scaleUp" if metric > target * replicas else "scaleDown"
    tolerance = USUAL if usual else spec["behavior"][direction]["tolerance"]
    ratio = metric / (target * replicas)
    return replicas if abs(ratio - 1) <= tolerance else math.ceil(metric / target)


def test_it_comes_to_the_planners_number_at_any_size(autoscaler: Any) -> None:
    for replicas in range(1, 41):
        for target in range(1, 45):
            assert wanted(autoscaler, replicas, target) == target
    assert wanted(autoscaler, 20, 21, usual=True) == 20, "with Kubernetes' own tolerance it would not"
