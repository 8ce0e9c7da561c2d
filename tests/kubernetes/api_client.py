"""A client of an API server that shows the bytes: JSON in and out, with the code of each answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

PLAIN = "application/json"
MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiClient:
    """Sends requests to one API server."""

    def __init__(self, url: str, token: str = "") -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx2.Client(base_url=url, headers=headers, timeout=10)

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(
        self,
        method: str,
        path: str,
        body: object = None,
        media_type: str = PLAIN,
        accept: str = "",
        **query: str,
    ) -> tuple[int, Any]:
        """Return the code and the body of an answer."""
        headers = {"Content-Type": media_type} | ({"Accept": accept} if accept else {})
        content = None if body is None else json.dumps(body).encode()
        answer = self._http.request(method, path, content=content, headers=headers, params=query)
        return answer.status_code, answer.json()

    def get(self, path: str, **query: str) -> Any:
        """Return an object or a list."""
        return self._expect("GET", path, **query)

    def post(self, path: str, body: object, **query: str) -> Any:
        """Create an object."""
        return self._expect("POST", path, body, **query)

    def put(self, path: str, body: object, **query: str) -> Any:
        """Replace an object."""
        return self._expect("PUT", path, body, **query)

    def patch(self, path: str, body: object, media_type: str = MERGE, **query: str) -> Any:
        """Patch an object."""
        return self._expect("PATCH", path, body, media_type, **query)

    def delete(self, path: str, body: object = None, **query: str) -> Any:
        """Delete an object."""
        return self._expect("DELETE", path, body, **query)

    def apply(self, path: str, body: object, manager: str, **query: str) -> Any:
        """Apply an object server-side."""
        return self._expect("PATCH", path, body, APPLY, fieldManager=manager, **query)

    @contextmanager
    def watch(self, path: str, **query: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Give the events of a watch."""
        with self._http.stream("GET", path, params={"watch": "true"} | query) as answer:
            yield (json.loads(line) for line in answer.iter_lines())

    def _expect(self, method: str, path: str, body: object = None, media_type: str = PLAIN, **query: str) -> Any:
        code, answer = self.send(method, path, body, media_type, **query)
        assert code < 300, (code, answer.get("message"), method, path)
        return answer
