"""Which GPUs there are: the knob, nvidia-smi, CUDA_VISIBLE_DEVICES; and a machine that has none."""

from pathlib import Path

import pytest

from penstock.adapters.connectors.gpu_inventory import inventory
from penstock.kernel.errors import ConfigError

FOUR = "0, GPU-aa11\n1, GPU-bb22\n2, GPU-cc33\n3, GPU-dd44\n"


def smi(folder: Path, output: str, status: int = 0) -> dict[str, str]:
    """Put a program that answers as nvidia-smi does into a PATH."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\nexit {status}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_a_machine_without_a_driver_has_none(tmp_path):
    assert inventory(None, {"PATH": str(tmp_path)}).gpus == ()


def test_all_that_nvidia_smi_lists(tmp_path):
    found = inventory(None, smi(tmp_path, FOUR))
    assert (found.gpus, found.source) == ((0, 1, 2, 3), "nvidia-smi")


def test_a_driver_that_does_not_answer_is_none(tmp_path):
    assert inventory(None, smi(tmp_path, "NVIDIA-SMI has failed because it couldn't talk\n", 9)).gpus == ()


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("2,0", (2, 0)), ("", ()), ("-1", ()), ("1,-1,2", (1,)), ("GPU-cc33,GPU-aa", (2, 0)), (" 3 , 3", (3,))],
)
def test_cuda_visible_devices_narrows_it(tmp_path, visible, gpus):
    assert inventory(None, {**smi(tmp_path, FOUR), "CUDA_VISIBLE_DEVICES": visible}).gpus == gpus


def test_without_nvidia_smi_its_indices_are_believed(tmp_path):
    assert inventory(None, {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1"}).gpus == (0, 1)


@pytest.mark.parametrize("visible", ["7", "GPU-zz", "MIG-1"])
def test_a_gpu_that_is_not_there_is_named(tmp_path, visible):
    with pytest.raises(ConfigError, match=rf"{visible}.*supervise\.gpus"):
        inventory(None, {**smi(tmp_path, FOUR), "CUDA_VISIBLE_DEVICES": visible})


def test_the_knob_wins(tmp_path):
    assert inventory((5, 6), {**smi(tmp_path, FOUR), "CUDA_VISIBLE_DEVICES": "1"}).gpus == (5, 6)
    assert inventory((), smi(tmp_path, FOUR)).gpus == ()
    with pytest.raises(ConfigError, match="twice"):
        inventory((1, 1), {})
