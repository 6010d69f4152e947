"""A pool of servers behind the OpenAI API, over HTTP. Needs the extra `serve`."""
