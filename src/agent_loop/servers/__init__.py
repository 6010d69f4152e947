"""LLM servers, and the client that balances over them."""
