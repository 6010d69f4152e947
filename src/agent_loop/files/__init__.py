"""Files that users give: their kinds, and the values in YAML and JSON."""
