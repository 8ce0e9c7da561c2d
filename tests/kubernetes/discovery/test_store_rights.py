"""The rights that are listed as data are enough for the store, and doctor names each that is missing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.cli.doctor_checks.discovery_checks import check_discovery
from penstock.config.reading.load import load
from penstock.config.settings.discovery_settings import KubernetesSettings
from penstock.testing.store_contract import watching
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.api.rights import STORE_RIGHTS, ResourceRight, missing_rights
from penstock_kubernetes.store.kubernetes_store import KubernetesStore
from tests.kubernetes.conftest import RunningApi


@pytest.fixture
def account(
    entries: RunningApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Log in as a service account with the rights that a test names."""
    name = tmp_path.name.replace("_", "-").strip("-")
    config = yaml.safe_load(entries.kubeconfig.read_text())
    token = service_account(entries.kubeconfig, name, request.param)
    config["users"][0]["user"] = {"token": token}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    yield


def service_account(kubeconfig: Path, name: str, rights: tuple[ResourceRight, ...]) -> str:
    from lightkube import Client, KubeConfig
    from lightkube.models.authentication_v1 import TokenRequestSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.models.rbac_v1 import PolicyRule, RoleRef, Subject
    from lightkube.resources.core_v1 import ServiceAccount, ServiceAccountToken
    from lightkube.resources.rbac_authorization_v1 import Role, RoleBinding

    client = Client(config=KubeConfig.from_file(kubeconfig).get())
    meta = ObjectMeta(name=name, namespace=client.namespace)
    rules = [PolicyRule(apiGroups=[r.group], resources=[r.resource], verbs=list(r.verbs)) for r in rights]
    client.create(ServiceAccount(metadata=meta))
    client.create(Role(metadata=meta, rules=rules))
    subject = Subject(kind="ServiceAccount", name=name, namespace=client.namespace)
    ref = RoleRef(apiGroup="rbac.authorization.k8s.io", kind="Role", name=name)
    client.create(RoleBinding(metadata=meta, roleRef=ref, subjects=[subject]))
    asked = ServiceAccountToken(metadata=meta, spec=TokenRequestSpec(audiences=[]))
    answer = client.create(asked, name)
    client.close()
    assert answer.status is not None
    return str(answer.status.token)


@pytest.mark.parametrize("account", [STORE_RIGHTS], indirect=True)
async def test_the_listed_rights_are_enough_for_the_store(account, tmp_path):
    mine = KubernetesStore(open_client(KubernetesSettings()), "rights")
    other = KubernetesStore(open_client(KubernetesSettings()), "rights")
    try:
        async with watching(other, "") as watcher:
            await mine.put("workers/a", b"1", ttl=1.0)
            await mine.put("workers/a", b"2", ttl=1.0)
            await watcher.until({"workers/a": b"2"})
            await asyncio.sleep(1.5)  # renewals need a right, too
            assert mine.renewal_failures == 0
            await mine.delete("workers/a")
            await watcher.until({})
        assert await other.list("") == {}
    finally:
        await mine.close()
        await other.close()


@pytest.mark.parametrize(
    "account", [(ResourceRight("coordination.k8s.io", "leases", ("get", "list", "watch")),)], indirect=True
)
def test_doctor_says_which_verb_on_which_resource_is_missing(account, monkeypatch):
    (finding,) = check_discovery(load(None, ["discovery.store=kubernetes"], {}).settings)
    assert finding.level == "error"
    for right in ("create leases.coordination.k8s.io", "patch penstockentries.penstock.io"):
        assert right in finding.text
    assert "list leases" not in finding.text
    assert finding.hint is not None


@pytest.mark.parametrize("account", [STORE_RIGHTS], indirect=True)
async def test_nothing_is_missing_where_all_is_granted(account):
    client = open_client(KubernetesSettings())
    try:
        assert await missing_rights(client, STORE_RIGHTS) == []
    finally:
        await client.close()
