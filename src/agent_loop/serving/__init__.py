"""The OpenAI API over HTTP in front of a pool of servers. Needs the extra `serve`."""
