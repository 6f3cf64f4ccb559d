"""Everything that touches verl and Ray. Importing this package imports neither."""
