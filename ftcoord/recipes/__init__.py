"""Small uses of the group mechanism: `Election` and `Barrier`."""
