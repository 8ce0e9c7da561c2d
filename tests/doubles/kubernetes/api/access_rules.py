"""Who may do what: bearer tokens, users and service accounts, roles with their bindings, reviews of rights."""

import base64
import hashlib
import hmac
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

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
PUBLIC_PATHS = ("/version", "/healthz", "/livez", "/readyz")
REVIEWS = {"selfsubjectaccessreviews", "selfsubjectrulesreviews", "selfsubjectreviews"}
"""Resources with which all users may ask about themselves."""


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
ANONYMOUS = ApiUser("system:anonymous", ("system:unauthenticated",))


class AccessRules:
    """Knows the tokens, and reads roles and bindings from the store."""

    def __init__(self, store: ApiStore, now: Callable[[], float], rng: random.Random, without_token: ApiUser) -> None:
        self._store = store
        self._without_token = without_token
        self._now = now
        self._key = rng.randbytes(32)
        self._rng = rng
        self._tokens = {ADMIN_TOKEN: IssuedToken(ADMIN, float("inf"))}

    def user_of(self, authorization: str) -> ApiUser:
        """Return the user of an Authorization header.

        Raises:
            ApiFailure: 401 for a token that is unknown, expired, or of a service account that is gone.
        """
        if not authorization:
            return self._without_token
        user = self.user_of_token(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise unauthorized()
        return user

    def impersonated(self, user: ApiUser, headers: Mapping[str, str], groups: Iterable[str]) -> ApiUser:
        """Return the user that a request is made for: that of ``Impersonate-User``, if its sender may."""
        name = headers.get("Impersonate-User")
        if name is None:
            return user
        self.check(user, AccessRequest("impersonate", "", "users", "", name))
        if name.startswith("system:serviceaccount:"):
            _, _, namespace, account = name.split(":")
            return service_account(namespace, account, "")
        return ApiUser(name, (*groups, "system:authenticated"))

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
        """Return a token for a service account, in the form of a JWT, and when it expires."""
        metadata = account["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        user = service_account(namespace, name, metadata["uid"])
        expires_s = self._now() + seconds
        claims = {"iss": "kubernetes/serviceaccount", "sub": user.name, "exp": int(expires_s), "iat": int(self._now())}
        claims |= {"jti": str(uuid.UUID(int=self._rng.getrandbits(128), version=4))}
        parts = [_base64(msgspec.json.encode(each)) for each in ({"alg": "HS256", "typ": "JWT"}, claims)]
        signed = ".".join(parts)
        token = f"{signed}.{_base64(hmac.digest(self._key, signed.encode(), hashlib.sha256))}"
        self._tokens[token] = IssuedToken(user, expires_s)
        return token, expires_s

    def add_user(self, token: str, name: str, groups: Iterable[str] = ()) -> None:
        """Let a token stand for a user."""
        self._tokens[token] = IssuedToken(ApiUser(name, (*groups, "system:authenticated")), float("inf"))

    def expire_tokens(self) -> None:
        """Make all tokens of service accounts invalid."""
        self._tokens = {token: issued for token, issued in self._tokens.items() if not issued.user.uid}

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
        public = PUBLIC_PATHS if user is ANONYMOUS else READABLE_PATHS
        if verb == "get" and any(path == each or path.startswith(f"{each}/") for each in public):
            return
        for rule in self.rules_of(user, ""):
            paths = rule.get("nonResourceURLs") or []
            if _any_of(rule["verbs"], verb) and any(_path_fits(each, path) for each in paths):
                return
        raise forbidden(f'forbidden: User "{user.name}" cannot {verb} path "{path}"')

    def allows(self, user: ApiUser, access: AccessRequest) -> bool:
        """Return whether a rule of the user's roles covers a request."""
        if access.resource in REVIEWS and user is not ANONYMOUS:
            return True
        return any(_covers(rule, access) for rule in self.rules_of(user, access.namespace))

    def rules_of(self, user: ApiUser, namespace: str) -> Iterator[JsonObject]:
        """Yield the rules that a user has in the whole cluster and in a namespace."""
        if "system:masters" in user.groups:
            yield {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
            yield {"verbs": ["*"], "nonResourceURLs": ["*"]}
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

    def check_grant(self, user: ApiUser, plural: str, item: JsonObject, namespace: str) -> None:
        """Raise 403 where a user writes a role or a binding that gives more than the user has."""
        if plural not in ("roles", "clusterroles", "rolebindings", "clusterrolebindings"):
            return
        if "system:masters" in user.groups:
            return  # whatever it grants
        binding = plural.endswith("bindings")
        resource = ("clusterroles" if item["roleRef"]["kind"] == "ClusterRole" else "roles") if binding else plural
        name = item["roleRef"]["name"] if binding else item["metadata"].get("name", "")
        if self.allows(user, AccessRequest("bind" if binding else "escalate", RBAC, resource, namespace, name)):
            return
        rules = self.role_rules(item["roleRef"], namespace) if binding else item.get("rules") or []
        missing = [rule for rule in rules if not all(self.allows(user, each) for each in _requests(rule, namespace))]
        if missing:
            text = "; ".join(msgspec.json.encode(rule).decode() for rule in missing)
            raise forbidden(
                f'{plural}.{RBAC} "{item["metadata"].get("name", "")}" is forbidden: user "{user.name}" '
                f"(groups={msgspec.json.encode(user.groups).decode()}) is attempting to grant RBAC permissions "
                f"not currently held: {text}"
            )

    def review(self, kind: str, item: JsonObject, user: ApiUser) -> JsonObject:
        """Return a review of rights or of a token with its answer in the status."""
        spec = item.get("spec") or {}
        match kind:
            case "SelfSubjectReview":
                return item | {"status": {"userInfo": {"username": user.name, "groups": list(user.groups)}}}
            case "TokenReview":
                subject = self.user_of_token(spec.get("token", ""))
                if subject is None:
                    return item | {"status": {"authenticated": False, "error": "the token is unknown or expired"}}
                info = {"username": subject.name, "groups": list(subject.groups), "uid": subject.uid}
                return item | {"status": {"authenticated": True, "user": info}}
            case "SelfSubjectRulesReview":
                rules = list(self.rules_of(user, spec.get("namespace", "")))
                paths = [rule for rule in rules if "nonResourceURLs" in rule]
                plain = [rule for rule in rules if "nonResourceURLs" not in rule]
                return item | {"status": {"resourceRules": plain, "nonResourceRules": paths, "incomplete": False}}
        if "user" in spec or "groups" in spec:
            user = ApiUser(spec.get("user", ""), tuple(spec.get("groups") or ()))
        attributes = spec.get("resourceAttributes") or {}
        subresource = attributes.get("subresource")
        resource = attributes.get("resource", "") + (f"/{subresource}" if subresource else "")
        allowed = self.allows(
            user,
            AccessRequest(
                attributes.get("verb", ""),
                attributes.get("group", ""),
                resource,
                attributes.get("namespace", ""),
                attributes.get("name", ""),
            ),
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


def _requests(rule: JsonObject, namespace: str) -> Iterator[AccessRequest]:
    """Yield everything that a rule allows, as requests that its author must be allowed, too."""
    for verb in rule["verbs"]:
        for group in rule.get("apiGroups") or []:
            for resource in rule.get("resources") or []:
                for name in rule.get("resourceNames") or [""]:
                    yield AccessRequest(verb, group, resource, namespace, name)


def _path_fits(pattern: str, path: str) -> bool:
    return path.startswith(pattern[:-1]) if pattern.endswith("*") else pattern == path


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
