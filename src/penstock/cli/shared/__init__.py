"""Parts that several commands share: the admin client, output, flags, completion and waiting."""
