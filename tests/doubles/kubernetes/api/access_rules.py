"""Who may do what: bearer tokens, users and service accounts, roles with their bindings, reviews of rights."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import forbidden, unauthorized
from tests.doubles.kubernetes.objects.api_store import ApiStore

ADMIN_TOKEN = "admin"
"""The token in the kubeconfig that the server writes; its user may do everything."""
RBAC = "rbac.authorization.k8s.io"
TOKEN_S = 3600
"""What a token request that names no time gets."""
READABLE_PATHS = ("/api", "/apis", "/openapi", "/version", "/healthz", "/livez", "/readyz")
"""Paths that any user with a token may read, as the role `system:discovery` allows it."""
REVIEWS = "selfsubjectaccessreviews"
"""Resource with which all users may ask about themselves."""


class ApiUser(NamedTuple):
    """Who sends a request."""

    name: str
    groups: tuple[str, ...]
    uid: str = ""


class AccessRequest(NamedTuple):
    """What a user wants to do with a resource."""

    verb: str
    group: str
    resource: str
    """Plural, with ``/SUBRESOURCE`` where there is one."""
    namespace: str = ""
    name: str = ""


class IssuedToken(NamedTuple):
    """The user of a token, and until when it is valid."""

    user: ApiUser
    expires_s: float


ADMIN = ApiUser("admin", ("system:masters", "system:authenticated"))


class AccessRules:
    """Knows the tokens, and reads roles and bindings from the store."""

    def __init__(self, store: ApiStore, now: Callable[[], float], rng: random.Random) -> None:
        self._store = store
        self._now = now
        self._rng = rng
        self._tokens = {ADMIN_TOKEN: IssuedToken(ADMIN, float("inf"))}

    def user_of(self, authorization: str) -> ApiUser:
        """Return the user of an Authorization header.

        Raises:
            ApiFailure: 401 for a token that is unknown, expired, or of a service account that is gone.
        """
        if not authorization:
            return ADMIN
        user = self.user_of_token(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise unauthorized()
        return user

    def user_of_token(self, token: str) -> ApiUser | None:
        """Return the user of a token, or None."""
        issued = self._tokens.get(token)
        if issued is None or issued.expires_s <= self._now():
            return None
        if issued.user.uid:
            _, _, namespace, name = issued.user.name.split(":")
            account = self._store.get("serviceaccounts", (namespace, name))
            if account is None or account["metadata"]["uid"] != issued.user.uid:
                return None
        return issued.user

    def issue(self, account: JsonObject, seconds: float = TOKEN_S) -> tuple[str, float]:
        """Return a token for a service account, and when it expires."""
        metadata = account["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        user = service_account(namespace, name, metadata["uid"])
        token = f"{user.name}:{self._rng.getrandbits(128):x}"
        self._tokens[token] = IssuedToken(user, self._now() + seconds)
        return token, self._now() + seconds

    def add_user(self, token: str, name: str, groups: Iterable[str] = ()) -> None:
        """Let a token stand for a user."""
        self._tokens[token] = IssuedToken(ApiUser(name, (*groups, "system:authenticated")), float("inf"))

    def check(self, user: ApiUser, access: AccessRequest) -> None:
        """Raise 403, in the words of Kubernetes, for what a user may not do."""
        if self.allows(user, access):
            return
        resource = access.resource.partition("/")[0]
        shown = f"{resource}.{access.group}" if access.group else resource
        where = f' in the namespace "{access.namespace}"' if access.namespace else " at the cluster scope"
        target = f'{shown} "{access.name}"' if access.name else shown
        raise forbidden(
            f'{target} is forbidden: User "{user.name}" cannot {access.verb} resource '
            f'"{access.resource}" in API group "{access.group}"{where}',
            shown,
            access.name,
        )

    def check_path(self, user: ApiUser, verb: str, path: str) -> None:
        """Raise 403 for a path outside the resources that a user may not read."""
        if verb != "get" or not any(path == each or path.startswith(f"{each}/") for each in READABLE_PATHS):
            raise forbidden(f'forbidden: User "{user.name}" cannot {verb} path "{path}"')

    def allows(self, user: ApiUser, access: AccessRequest) -> bool:
        """Return whether a rule of the user's roles covers a request."""
        if access.resource == REVIEWS:
            return True
        return any(_covers(rule, access) for rule in self.rules_of(user, access.namespace))

    def rules_of(self, user: ApiUser, namespace: str) -> Iterator[JsonObject]:
        """Yield the rules that a user has in the whole cluster and in a namespace."""
        if "system:masters" in user.groups:
            yield {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
        bindings = self._store.items(f"clusterrolebindings.{RBAC}")
        if namespace:
            bindings = bindings + self._store.items(f"rolebindings.{RBAC}", namespace)
        for binding in bindings:
            own = binding["metadata"].get("namespace", "")
            if any(_is_subject(each, user, own) for each in binding.get("subjects") or []):
                yield from self.role_rules(binding["roleRef"], own)

    def role_rules(self, reference: JsonObject, namespace: str) -> list[JsonObject]:
        """Return the rules of the role that a binding names."""
        if reference["kind"] == "ClusterRole":
            role = self._store.get(f"clusterroles.{RBAC}", ("", reference["name"]))
        else:
            role = self._store.get(f"roles.{RBAC}", (namespace, reference["name"]))
        return list((role or {}).get("rules") or [])

    def review(self, item: JsonObject, user: ApiUser) -> JsonObject:
        """Return a user's question about a right with its answer in the status."""
        attributes = item["spec"]["resourceAttributes"]
        subresource = attributes.get("subresource")
        resource = attributes.get("resource", "") + (f"/{subresource}" if subresource else "")
        fields = (attributes.get(name, "") for name in ("namespace", "name"))
        allowed = self.allows(
            user, AccessRequest(attributes.get("verb", ""), attributes.get("group", ""), resource, *fields)
        )
        return item | {"status": {"allowed": allowed}}


def service_account(namespace: str, name: str, uid: str) -> ApiUser:
    """Return the user that a service account is."""
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
    return ApiUser(f"system:serviceaccount:{namespace}:{name}", groups, uid)


def _is_subject(subject: JsonObject, user: ApiUser, namespace: str) -> bool:
    if subject["kind"] == "ServiceAccount":
        return user.name == f"system:serviceaccount:{subject.get('namespace') or namespace}:{subject['name']}"
    return subject["name"] in user.groups if subject["kind"] == "Group" else subject["name"] == user.name


def _any_of(allowed: Iterable[str], value: str) -> bool:
    return "*" in allowed or value in allowed


def _covers(rule: JsonObject, access: AccessRequest) -> bool:
    resources = rule.get("resources") or []
    _, _, subresource = access.resource.partition("/")
    fits = _any_of(resources, access.resource) or (subresource != "" and f"*/{subresource}" in resources)
    names = rule.get("resourceNames") or []
    return (
        fits
        and _any_of(rule["verbs"], access.verb)
        and _any_of(rule.get("apiGroups") or [], access.group)
        and (not names or access.name in names)
    )
