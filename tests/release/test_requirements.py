"""The pins of requirements/ci.txt: a hash on each, no host, within pyproject's ranges, no bad release."""

import re
import tomllib
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.release.release_script import ROOT

LINES = (ROOT / "requirements/ci.txt").read_text().replace("\\\n", " ").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BAD = {
    "litellm": ("1.82.7", "1.82.8", "1.107.0"),
    "pyjwt": ("2.10.0",),
    "cryptography": ("44.0.0",),
    "jinja2": ("3.1.4", "3.1.5"),
    "protobuf": ("6.31.0",),
}
"""Compromised, or with a hole in what we use of it."""


def pinned() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in LINES:
        requirement = Requirement(line.split(" --hash")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        found.setdefault(canonicalize_name(requirement.name), set()).add(pin.version)
    return found


def ranges(*extras: str) -> Iterator[Requirement]:
    for text in (*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])):
        yield Requirement(text)


def test_every_pin_has_hashes_and_no_line_names_a_host() -> None:
    assert len(LINES) > 100
    for line in LINES:
        pin, *hashes = line.split(" --hash=")
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", each.strip()) for each in hashes), line[:90]
        assert re.fullmatch(r"[\w.-]+==[\w.!+]+(?: ; [^/#@]+)?", pin.strip()), pin
    assert not re.search(r"://|index|find-links|trusted", "\n".join(LINES))


def test_the_pins_are_within_the_projects_ranges() -> None:
    pins = pinned()
    for requirement in ranges("dev", "fuzz", "clients"):
        versions = pins.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement.name} has no pin: run make requirements"
        assert all(version in requirement.specifier for version in versions), f"{requirement}: {versions}"


@pytest.mark.parametrize(("name", "version"), [(name, each) for name, bad in BAD.items() for each in bad])
def test_a_release_that_is_known_to_be_bad_is_in_no_range_and_no_pin(name: str, version: str) -> None:
    named = [requirement for requirement in ranges(*EXTRAS) if canonicalize_name(requirement.name) == name]
    assert named and not [str(requirement) for requirement in named if version in requirement.specifier]
    assert version not in pinned().get(name, ())
