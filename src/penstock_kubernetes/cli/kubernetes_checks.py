"""Doctor's check of Kubernetes: can its API server be reached, and does it grant what is needed."""

from penstock.cli.doctor_checks.finding import Finding
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import PenstockError
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.api.discovery_resources import DISCOVERY_LABEL, entry_class
from penstock_kubernetes.api.resource_watch import list_all
from penstock_kubernetes.api.rights import POD_POOL_RIGHTS, STORE_RIGHTS, missing_rights


async def check_kubernetes(settings: ClusterSettings, *, pods: bool) -> Finding:
    """Check the login, and the rights of the store and of pools whose servers are pods (``pods``)."""
    rights = (STORE_RIGHTS if settings.discovery.store == "kubernetes" else ()) + (POD_POOL_RIGHTS if pods else ())
    try:
        client = open_client(settings.discovery.kubernetes)
        try:
            missing = await missing_rights(client, rights)
            if settings.discovery.store == "kubernetes" and not missing:
                await list_all(client, entry_class(), labels={DISCOVERY_LABEL: settings.name})
        finally:
            await client.close()
    except PenstockError as error:
        return Finding("error", "kubernetes", error.message, error.hint)
    where = f"namespace {client.namespace}"
    if missing:
        hint = f"grant them to this account in {where}, by a Role and a RoleBinding"
        return Finding("error", "kubernetes", f"rights are missing in {where}: {', '.join(missing)}", hint)
    return Finding("ok", "kubernetes", f"the API server answers, and grants every right that is needed in {where}")
