"""How many workers of which kind should there be? Small plugins in a machine, and limits that always hold."""
