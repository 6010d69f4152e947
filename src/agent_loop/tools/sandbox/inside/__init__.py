"""Code of the sandbox's own processes. It uses the standard library only, and imports nothing from other packages."""
