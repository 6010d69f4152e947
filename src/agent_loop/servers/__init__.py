"""LLM servers, and the client that balances requests over them."""
