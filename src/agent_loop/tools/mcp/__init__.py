"""The tools `mcp`: whatever a server of the Model Context Protocol offers."""
