"""The tools `mcp`: tools of servers that implement the Model Context Protocol."""
