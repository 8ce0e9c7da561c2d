"""Script of a cluster: its nodes, its images, how long things take and how fast time passes in it."""

import os
import sys
from pathlib import Path

import msgspec

import penstock

PACKAGES = Path(penstock.__file__).resolve().parents[1]
"""Folder that our own package is imported from."""
PREFIX = "testing.penstock.io"
EVICT = f"{PREFIX}/evict"
"""Annotation of a pod: its kubelet evicts it, with this text as the message."""
SIGNAL = f"{PREFIX}/signal"
"""Annotation of a pod: its kubelet sends a signal, once for each value: "KILL", "KILL:2" (a second one)."""
NETWORK = f"{PREFIX}/network"
"""Annotation of a pod: "cut" takes its network away until the annotation goes."""
LOST = f"{PREFIX}/lost"
"""Annotation of a node: "off" ends its processes without a word, "cut" takes its network away; it reports no more."""


class ScriptedNode(msgspec.Struct, frozen=True):
    """A node and what it has for pods."""

    name: str
    cpu: str = "64"
    memory: str = "512Gi"
    gpus: int = 8
    product: str = "NVIDIA-H100-80GB-HBM3"
    """What NVIDIA's feature discovery calls its GPUs."""
    pods: int = 110


class ScriptedImage(msgspec.Struct, frozen=True):
    """What stands for an image: the command in front of a container's arguments, and how its pull goes."""

    entrypoint: tuple[str, ...] = ()
    env: dict[str, str] = {}
    failures: int = 0
    """So many pulls fail before one succeeds; -1: none ever does."""


def own_image() -> ScriptedImage:
    """Return the image of this Python with this Penstock in it."""
    path = os.pathsep.join([str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return ScriptedImage((sys.executable, "-m", "penstock"), {"PYTHONPATH": path})


class ClusterScript(msgspec.Struct, frozen=True):
    """How a cluster is and behaves. Images go by the last part of their name without tag and digest."""

    nodes: tuple[ScriptedNode, ...] = (ScriptedNode("node-1"), ScriptedNode("node-2"))
    images: dict[str, ScriptedImage] = msgspec.field(default_factory=lambda: {"penstock": own_image()})
    speed: float = 1.0
    """Pauses of back-off and of lost nodes take so many times less than in a real cluster."""

    def image(self, name: str) -> ScriptedImage:
        """Return what stands for an image; one that is not scripted needs a command in its container."""
        short = name.partition("@")[0].rpartition("/")[2].partition(":")[0]
        return self.images.get(short, ScriptedImage())
