"""Virtual time around the same decisions: a simulated cluster that ``core`` plans for."""
