"""Description of the routes of files and batches, for GET /openapi.json."""

from collections.abc import Sequence

from penstock.frontend.openapi.openapi import FOR_CLIENTS, FORM, RouteDescription, json_of, operation, path_parameters
from penstock.kernel.values import JsonObject
from penstock_extras.batches.batch_answers import Batch, BatchList, FileDeleted, FileList, StoredFile
from penstock_extras.batches.batch_routes import NewBatch

ERRORS = (400, 401, 404)


def description() -> RouteDescription:
    """Return their paths and structs."""
    return RouteDescription(
        {**_file_paths(), **_batch_paths()}, (StoredFile, FileList, FileDeleted, Batch, BatchList, NewBatch)
    )


def _file_paths() -> JsonObject:
    upload = _file_route("uploadFile", "Upload a file.", "StoredFile", more=(408, 413, 417), body=FORM)
    content = _file_route("fileContent", "The bytes of a file.", "StoredFile", "{job}")
    content["responses"]["200"]["content"] = {"application/octet-stream": {}}
    return {
        "/v1/files": {"get": _file_route("listFiles", "All files, the newest first.", "FileList"), "post": upload},
        "/v1/files/{job}": {
            "get": _file_route("getFile", "One file.", "StoredFile", "{job}"),
            "delete": _file_route("deleteFile", "Delete a file.", "FileDeleted", "{job}", more=(409,)),
        },
        "/v1/files/{job}/content": {"get": content},
    }


def _batch_paths() -> JsonObject:
    create = _file_route("createBatch", "Begin a batch.", "Batch", more=(408, 413, 429), body=json_of("NewBatch"))
    cancel = _file_route("cancelBatch", "End a batch before its time.", "Batch", "{batch}", more=(409,))
    return {
        "/v1/batches": {
            "get": _file_route("listBatches", "All batches, the newest first.", "BatchList"),
            "post": create,
        },
        "/v1/batches/{batch}": {"get": _file_route("getBatch", "One batch.", "Batch", "{batch}")},
        "/v1/batches/{batch}/cancel": {"post": cancel},
    }


def _file_route(
    name: str, summary: str, schema: str, path: str = "", more: Sequence[int] = (), body: JsonObject | None = None
) -> JsonObject:
    return operation(
        name,
        summary,
        "batches",
        json_of(schema),
        security=FOR_CLIENTS,
        parameters=path_parameters(path),
        body=body,
        problems=(*ERRORS, *more),
    )
