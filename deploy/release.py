"""Makes the files of a release: source archive, wheel, chart, image with its bill of materials, notes, checksums.

usage: python deploy/release.py VERSION [--dist dist] [--compiled] [--base IMAGE]     `make release VERSION=` runs it
       python deploy/release.py VERSION --set                                         `make version VERSION=` runs it

The version is `__version__` of src/penstock/__init__.py. Chart and manifests need it in their own text: `--set` writes
it into all of them, and a release is refused where they differ. Nothing is tagged, signed or uploaded: the commands for
that are printed, and left to who publishes. A step whose program is missing is left out and named.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ONE_PLACE = "src/penstock/__init__.py"
PLACES = {
    ONE_PLACE: r'^(__version__ = ")([^"]+)(?=")',
    "deploy/helm/penstock/Chart.yaml": r'^((?:version: |appVersion: "))([^"\n]+)',
    "deploy/kubernetes/kustomization.yaml": r"^(\s+newTag: )(\S+)",
    "deploy/kubernetes/operator.yaml": r"^(\s+(?:app\.kubernetes\.io/version: |(?:image|value): penstock:))(\S+)",
}
"""File -> the places where it has the version, the second group of a match."""
SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
IN_IMAGE = """
import importlib.metadata as m, json, platform, re
try:
    debian = re.findall(r"^Package: (.+)$(?:\\n.+)*?\\nVersion: (.+)$", open("/var/lib/dpkg/status").read(), re.M)
except OSError:
    debian = []
python = sorted({(d.metadata["Name"], d.version) for d in m.distributions()})
print(json.dumps({"pypi": python, "deb/debian": debian, "generic": [("python", platform.python_version())]}))
"""
"""Prints what an image has in it: kind of package URL -> names and versions."""


class Refused(Exception):
    """The release can't be made as things stand; the text says what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="VERSION", help="X.Y.Z")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--dist", type=Path, help="where VERSION's folder goes [dist of the checkout]")
    parser.add_argument("--set", action="store_true", help="only write the version into the checkout")
    parser.add_argument("--compiled", action="store_true", help="also a wheel with compiled hot modules")
    parser.add_argument("--base", help="image that the Dockerfile begins with, instead of its own")
    options = parser.parse_args(arguments)
    root, version = options.root.resolve(), options.version
    try:
        if not SEMVER.fullmatch(version):
            raise Refused(f"the version {version!r} is not X.Y.Z, three numbers as in 0.2.0")
        if options.set:
            for name in changed_places(root, version):
                print(f"wrote {version} into {name}")
            return 0
        return release(root, version, (options.dist or root / "dist") / version, options.compiled, options.base)
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failed:
        print(f"failed with status {failed.returncode}: {' '.join(map(str, failed.cmd))}", file=sys.stderr)
        return 1


def release(root: Path, version: str, folder: Path, compiled: bool, base: str | None) -> int:
    """Check, then make everything into an empty ``folder``; return the exit status."""
    notes = checked(root, version)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "NOTES.md").write_text(notes)
    distributions(root, folder, compiled)
    left_out = list(filter(None, (chart(root, version, folder), image(root, version, folder, base))))
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print(f"\nPenstock {version} in {folder}:")
    for path in files:
        print(f"  {path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    for reason in left_out:
        print(f"  left out: {reason}")
    print(next_steps(version, folder, [path.name for path in files]))
    return 0


def checked(root: Path, version: str) -> str:
    """Return the version's section of CHANGELOG.md.

    Raises:
        Refused: a place has another version, CHANGELOG has no such section, a file is not committed, or the version
            does not follow the newest tag.
    """
    others = {name: found for name, found in versions(root).items() if found != {version}}
    if others:
        listed = "; ".join(f"{name} has {', '.join(sorted(found)) or 'none'}" for name, found in others.items())
        raise Refused(f"{listed}. Run `make version VERSION={version}` and commit that")
    notes = section(Path(root, "CHANGELOG.md").read_text(), version)
    if (root / ".git").exists():
        if changes := git(root, "status", "--porcelain", "--untracked-files=no"):
            raise Refused(f"these changes are not committed, and the wheel names its commit:\n{changes}")
        tags = [tag for tag in git(root, "tag", "--list", "v*").splitlines() if SEMVER.fullmatch(tag[1:])]
        if tags:
            follow(max(tags, key=lambda tag: numbers(tag[1:]))[1:], version)
    return notes


def versions(root: Path) -> dict[str, set[str]]:
    """Return the versions that each file has in its places."""
    return {
        name: {match[2] for match in re.finditer(pattern, Path(root, name).read_text(), re.MULTILINE)}
        for name, pattern in PLACES.items()
    }


def changed_places(root: Path, version: str) -> Iterator[str]:
    """Write the version into every place; yield the files that had another one."""
    for name, pattern in PLACES.items():
        path = root / name
        text = path.read_text()
        path.write_text(re.sub(pattern, lambda match: match[1] + version, text, flags=re.MULTILINE))
        if path.read_text() != text:
            yield name


def section(changelog: str, version: str) -> str:
    """Return what CHANGELOG.md says of a version, without its heading.

    Raises:
        Refused: nothing.
    """
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        if heading.split()[:1] == [version] and text.strip():
            return f"{text.strip()}\n"
    raise Refused(f"CHANGELOG.md has no section `## {version}`: write what changed for users, and what they do")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def follow(before: str, version: str) -> None:
    """Let through the next patch, minor or major version.

    Raises:
        Refused: it is another one.
    """
    major, minor, patch = numbers(before)
    after = [f"{major}.{minor}.{patch + 1}", f"{major}.{minor + 1}.0", f"{major + 1}.0.0"]
    if version not in after:
        raise Refused(f"after the tag v{before} comes {after[0]}, {after[1]} or {after[2]}, not {version}")


def distributions(root: Path, folder: Path, compiled: bool) -> None:
    """Build source archive and pure wheel, the wheel from the archive, and hold them to the index's rules."""
    pure = {name: value for name, value in os.environ.items() if name != "HATCH_BUILD_HOOKS_ENABLE"}
    build = (sys.executable, "-m", "build", "--outdir", folder)
    subprocess.run([*build, "--no-isolation", root], check=True, env=pure)
    if compiled:  # in an environment of its own, with mypy
        subprocess.run([*build, "--wheel", root], check=True, env={**pure, "HATCH_BUILD_HOOKS_ENABLE": "1"})
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


def chart(root: Path, version: str, folder: Path) -> str | None:
    """Package the chart; return why not, where it was not."""
    helm = program("helm", root)
    if helm is None:
        return "the chart: no helm on the path or in .programs, where `make test-kubernetes` puts it"
    words = ("package", root / "deploy/helm/penstock", "--version", version, "--app-version", version)
    subprocess.run([helm, *words, "--destination", folder], check=True)
    return None


def image(root: Path, version: str, folder: Path, base: str | None) -> str | None:
    """Build the image into an archive, with its bill of materials beside it; return why not, where it was not."""
    buildah = program("buildah", root)
    if buildah is None:
        return "the image: no buildah on the path (Debian and Fedora have it as a package)"
    name = f"penstock:{version}"
    arguments = [("BASE", base), ("COMMIT", commit(root))]
    given = [word for key, value in arguments if value for word in ("--build-arg", f"{key}={value}")]
    subprocess.run([buildah, "build", *given, "--tag", name, root], check=True)
    archive((buildah,), name, version, folder)
    return None


def archive(buildah: Sequence[str | Path], name: str, version: str, folder: Path) -> None:
    """Write an image as one file, and its bill of materials beside it."""
    stem = f"penstock-{version}-image"
    subprocess.run([*buildah, "push", name, f"oci-archive:{folder / stem}.tar:{name}"], check=True)
    (folder / f"{stem}.cdx.json").write_text(json.dumps(materials(buildah, name, version), indent=1) + "\n")


def materials(buildah: Sequence[str | Path], name: str, version: str) -> dict[str, Any]:
    """Return an image's packages, those of Python and of Debian, as CycloneDX has them."""

    def output(*words: str) -> str:
        return subprocess.run([*buildah, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    container = output("from", "--pull-never", name)
    try:
        found = json.loads(output("run", container, "--", "python", "-c", IN_IMAGE))
    finally:
        output("rm", container)
    components = [
        {"type": "library", "name": each, "version": its, "purl": f"pkg:{kind}/{each.lower()}@{its}"}
        for kind, packages in found.items()
        for each, its in packages
    ]
    subject = {"type": "container", "name": "penstock", "version": version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }


def program(name: str, root: Path) -> str | None:
    """Return a program's path: from the folder of fetched programs, or the path of the environment."""
    fetched = Path(os.environ.get("PENSTOCK_K8S_PROGRAMS") or root / ".programs").expanduser() / "bin" / name
    return str(fetched) if fetched.exists() else shutil.which(name)


def commit(root: Path) -> str | None:
    if not (root / ".git").exists():
        return None
    described = git(root, "describe", "--always", "--dirty", "--exclude=*")
    return f"{described} of {git(root, 'log', '-1', '--format=%cs')}"


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def next_steps(version: str, folder: Path, files: Sequence[str]) -> str:
    """Return the commands that publish, for whoever holds the keys."""
    steps = [
        f"git tag --sign v{version} --file {folder}/NOTES.md --cleanup=verbatim && git push origin v{version}",
        f"gpg --detach-sign --armor {folder}/SHA256SUMS",
        f"twine upload {folder}/*-none-any.whl {folder}/*.tar.gz",
    ]
    if f"penstock-{version}.tgz" in files:
        steps.append(f"helm push {folder}/penstock-{version}.tgz oci://REGISTRY")
    if f"penstock-{version}-image.tar" in files:
        steps.append(f"buildah push penstock:{version} docker://REGISTRY/penstock:{version}")
    if any("-linux_" in name for name in files):
        steps.append("auditwheel repair the compiled wheel: an index takes no linux_ tag")
    return "\nNext, by who publishes:\n" + "\n".join(f"  {step}" for step in steps)


if __name__ == "__main__":
    sys.exit(main())
