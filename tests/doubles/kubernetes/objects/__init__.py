"""Objects of any kind in the API server's double: store, patches, owners of fields, selectors, schemas, failures."""
